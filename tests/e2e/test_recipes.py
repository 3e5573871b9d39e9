"""Rendered recipes on the local cluster: real operator and nodes, the ConfigMap mounted, each start with its size's configuration."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.conftest import ROOT
from tests.e2e.job_run import JobRun
from tests.e2e.test_recipe_example import LOSS_TOLERANCE, losses_in
from tests.long_runs import LongRun
from tests.patience import PATIENCE_S
from tests.unit.recipes.documents import GLOBAL_BATCH, all_recipes

from elastipod.recipes.recipe_command import main
from elastipod_local.cluster import Cluster

LIFE = (1, 4, 2)
EPOCHS = 300  # 900 steps: more than the resizes take
# What makes a recipe for 8 GPUs a node one of toy size: a rank for each of at most four nodes.
TOY = (
    "elastic_policy.is_elastic=true",
    "elastic_policy.max_nodes=4",
    "elastic_policy.scaling_timeout=1",
    "trainer.devices=1",
)
THREE_UNEVEN = "scale_config.3.training_config.training_args.uneven_batch"
THREE_TOY = [
    f"{THREE_UNEVEN}.{name}={value}"
    for name, value in {
        "num_dp_groups_with_small_batch_size": 1, "small_local_batch_size": 42, "large_local_batch_size": 43
    }.items()
]  # fmt: skip
# One of each set of sizes, of three families; both methods are among them.
CHOSEN = {"deepseek_0b_sft_lora": (1, 2, 4), "gpt_oss_1b_dpo": (1, 2, 4), "llama_4b_sft_lora": (1, 2, 3, 4)}


def rendered(recipe: str, folder: Path, data: str, epochs: int, capsys: pytest.CaptureFixture[str]) -> tuple[Any, Any]:
    """Give the ConfigMap and the job of a recipe of the documents' kind, as the command renders them at toy size."""
    (config,) = [config for name, config, _ in all_recipes() if name == recipe]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(config))
    overrides = [*TOY, f"run.results_dir={data}", f"training_config.training_args.num_train_epochs={epochs}"]
    overrides += THREE_TOY if 3 in config["scale_config"] else []
    script = "/opt/elastipod/examples/recipe/train.py --min-step-time=0.1"
    options = ("--image=docker.io/elastipod/train:dev", "--claim=training-data:/data", "--resource=cpu=600m")
    assert main(["render", str(folder / "recipe.yaml"), *overrides, *options, f"--script={script}"]) == 0
    config_map, job = yaml.safe_load_all(capsys.readouterr().out)
    return config_map, job


@pytest.fixture
def recipe_job(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[JobRun]:
    """The job of a recipe, which names it; deleted afterwards, with its ConfigMap."""
    run = JobRun(cluster, request.param.replace("_", "-"))
    yield run
    run.delete()
    cluster.kubectl("delete", "configmap", f"training-config-{run.name}", "--ignore-not-found")


def live(job: JobRun, config_map: Any, body: Any, sizes: tuple[int, ...]) -> None:
    """Run the rendered job at 1, 4 and 2 replicas, and see which configuration each start takes."""
    policy = body["spec"]["elasticPolicy"]
    assert (policy["replicaDiscreteValues"], body["metadata"]["name"]) == (list(sizes), job.name)
    assert config_map["metadata"]["name"] == f"training-config-{job.name}"
    assert list(config_map["data"]) == ["config.yaml", *(f"config-n{size}.yaml" for size in sizes)]
    # What a user adds who decides about the size alone, and has no time to wait.
    body["spec"] |= {"replicas": LIFE[0], "elastipod": {"growth": "Maximum", "minStableSeconds": 1, "payback": "Off"}}
    job.cluster.kubectl("apply", "--validate=strict", "-f", "-", input=yaml.safe_dump_all([config_map, body]))
    for size in LIFE:
        if size != LIFE[0]:
            job.scale(size)
        job.until_training(size, beyond_step=job.step() + 5)
        even = GLOBAL_BATCH // size
        said = f"config-n{size}.yaml: {size} nodes, parts of [{even}] samples"
        job.until(said, lambda said=said: said in printed(job))  # type: ignore[misc]
    starts = [entry["to"] for entry in job.history()]
    assert [starts[0], starts[-1]] == [LIFE[0], LIFE[-1]]
    assert LIFE[1] in starts, "a growth may take what is ready first, so that 2 or 3 come before 4"
    for pod in job.running_pods():
        mounted = job.cluster.kubectl("exec", pod["metadata"]["name"], "--", "ls", "/config").split()
        assert sorted(mounted) == sorted(config_map["data"])


def printed(job: JobRun) -> str:
    return job.cluster.kubectl("logs", "-l", f"HPJob={job.name}", "--tail=-1", check=False)


@pytest.mark.long("recipes")
@pytest.mark.parametrize("recipe_job", CHOSEN, indirect=True)
def test_recipes_train_to_their_ends_over_resizes(
    recipe_job: JobRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    long_run: LongRun,
    request: pytest.FixtureRequest,
) -> None:
    job, recipe = recipe_job, request.node.callspec.params["recipe_job"]
    config_map, body = rendered(recipe, tmp_path, f"/data/{job.name}", EPOCHS, capsys)
    live(job, config_map, body, CHOSEN[recipe])
    job.until("completion", lambda: job.state() == "Completed", 2 * PATIENCE_S)
    audit = job.audit()
    assert (audit["exit_code"], audit["exact"], audit["completed"]) == (0, True, True), audit
    expected = undisturbed_losses(rendered(recipe, tmp_path, str(tmp_path / "results"), EPOCHS, capsys)[0], tmp_path)
    found = losses_in(job.samples())
    assert sorted(found) == sorted(expected) == list(range(1, audit["final_step"] + 1))
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
    starts = [entry["to"] for entry in job.history()]
    long_run.count(**{f"{recipe}: starts": len(starts), f"{recipe}: samples exactly once": audit["samples_unique"]})
    long_run.detail(**{recipe: {"sizes": starts, "steps": audit["final_step"]}})


def undisturbed_losses(config_map: Any, folder: Path) -> dict[int, float]:
    """Train the recipe on this machine at one size; gives the loss after each step."""
    configs = folder / "config"
    configs.mkdir()
    for name, text in config_map["data"].items():
        (configs / name).write_text(text)
    script = [str(ROOT / "examples" / "recipe" / "train.py"), f"--config-path={configs}", "--min-step-time=0"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *script],
        env={**os.environ, "NNODES": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"left after step \d+", done.stdout), done.stdout
    return losses_in(folder / "results" / "samples")
