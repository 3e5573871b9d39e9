"""The example of a recipe with real agents and torch: each start takes the configuration of its own size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess
from tests.e2e.agent_scripts import RunAgent
from tests.free_ports import free_port

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.recipes.recipe_command import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "recipe"
LOSS_TOLERANCE = 1e-4
TOTAL_STEPS = 76  # 4 epochs of 300 samples, 16 in a step


class RecipeRun:
    """The job of the rendered recipe: its configurations in a folder, and an agent for each pod."""

    def __init__(self, folder: Path, run_one: RunAgent, rendered: str, *, step_s: float) -> None:
        config_map, _ = yaml.safe_load_all(rendered)
        self.configs, self.samples = folder / "config", folder / "results" / "samples"
        self.configs.mkdir(parents=True)
        for name, text in config_map["data"].items():
            (self.configs / name).write_text(text)
        self._run_one = run_one
        self._step_s = step_s
        self.agents: list[AgentProcess] = []

    def start(self, generation: int, nnodes: int) -> None:
        """Start a generation, on the first pods of the job."""
        script = (EXAMPLE / "train.py").read_text()
        arguments = (f"--config-path={self.configs}", f"--min-step-time={self._step_s}")
        while len(self.agents) < nnodes:
            self.agents.append(self._run_one(script, "--nproc-per-node=1", script_args=arguments, is_warm=True))
        port = free_port()
        for rank, agent in enumerate(self.agents[:nnodes]):
            assert agent.start(generation, rank=rank, nnodes=nnodes, master_port=port) == (200, None)

    def reach(self, step: int) -> None:
        until(lambda: (self.agents[0].status()["worker"]["step"] or 0) >= step, f"step {step}:\n{self.printed()}")

    def drain(self, generation: int, nnodes: int) -> None:
        for agent in self.agents[:nnodes]:
            assert agent.drain(generation) == (200, None)
        assert [agent.until("ready")["drained"] for agent in self.agents[:nnodes]] == [True] * nnodes

    def complete(self, nnodes: int) -> None:
        for agent in self.agents[:nnodes]:
            agent.until("completed")

    def printed(self) -> str:
        return self.agents[0].printed()

    def losses(self) -> dict[int, float]:
        return losses_in(self.samples)


def losses_in(samples: Path) -> dict[int, float]:
    """Give the loss after each step, as rank 0 of the generation that made it logged it."""
    found: dict[int, float] = {}
    for path in sorted(samples.glob("gen-*-rank-00000.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        found |= {record["step"]: float(record["loss"]) for record in records if record["kind"] == "step"}
    return found


def rendered(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Give the example's recipe as the command of its README renders it."""
    arguments = ("--image=docker.io/elastipod/train:dev", "--claim=training-data:/data", "--resource=cpu=600m")
    script = "--script=/opt/elastipod/examples/recipe/train.py"
    assert main(["render", str(EXAMPLE / "recipe.yaml"), *overrides, *arguments, script]) == 0
    return capsys.readouterr().out


def test_the_manifest_of_the_example_is_what_the_command_renders(capsys: pytest.CaptureFixture[str]) -> None:
    assert rendered(capsys) == (EXAMPLE / "job.yaml").read_text()


@pytest.mark.long("variants")
def test_each_start_takes_the_configuration_of_its_size(
    tmp_path: Path,
    run_agent: RunAgent,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = []
    for name, step_s in (("undisturbed", 0), ("resized", 0.15)):
        folder = tmp_path / name
        recipe = rendered(capsys, f"run.results_dir={folder / 'results'}")
        runs.append(RecipeRun(folder, run_agent, recipe, step_s=step_s))
    undisturbed, resized = runs
    undisturbed.start(1, 1)
    undisturbed.complete(1)

    resized.start(1, 1)
    resized.reach(10)
    resized.drain(1, 1)
    resized.start(2, 4)
    resized.reach(30)
    resized.drain(2, 4)
    resized.start(3, 2)
    resized.complete(2)

    chosen = re.findall(r"(config\S*): (\d) nodes, parts of (\[.*\]) samples", resized.printed())
    assert chosen == [("config-n1.yaml", "1", "[16]"), ("config-n4.yaml", "4", "[4]"), ("config-n2.yaml", "2", "[8]")]
    report = audit(read_logs(resized.samples))
    assert (report.exact, report.completed) == (True, True), report
    expected, found = undisturbed.losses(), resized.losses()
    assert sorted(found) == sorted(expected) == list(range(1, TOTAL_STEPS + 1))
    assert expected[TOTAL_STEPS] < expected[1] / 2, "it learns, so that equal losses say something"
    assert found == pytest.approx(expected, rel=LOSS_TOLERANCE)
