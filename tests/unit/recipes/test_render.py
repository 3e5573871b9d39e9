"""A recipe becomes a job and a ConfigMap that the operator resolves to the same sizes, or is refused with what to change."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.nonempty import every, some
from tests.unit.recipes.documents import GLOBAL_BATCH, RANKS_PER_NODE, all_recipes, recipe

from elastipod.batches.recipes import ElasticRecipe
from elastipod.errors import BatchSizeError, RecipeError
from elastipod.recipes.checked_recipe import check_recipe
from elastipod.recipes.recipe_command import main, overridden
from elastipod.recipes.render import RenderOptions, configs, render
from elastipod_operator.api import HyperPodPyTorchJob
from elastipod_operator.kube.job_policy import policy_of

RECIPES = list(all_recipes())
OPTIONS = RenderOptions(name="job", image="example.com/train:1", script=("train.py",), ranks_per_node=RANKS_PER_NODE)
ELASTIC = "recipes.elastic_policy.is_elastic=true"


def rendered(config: dict[str, Any], *overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    checked = check_recipe(overridden(config, overrides), ranks_per_node=RANKS_PER_NODE)
    return render(checked, OPTIONS)


def allowed(job: dict[str, Any]) -> tuple[int, ...]:
    return tuple(policy_of(HyperPodPyTorchJob.model_validate(job).spec).sizes.allowed)


def test_there_are_as_many_recipes_as_in_the_collection() -> None:
    assert len(RECIPES) == 46
    assert len({sizes for _, _, sizes in RECIPES}) == 3


@pytest.mark.parametrize(("config", "sizes"), [each[1:] for each in RECIPES], ids=[name for name, _, _ in RECIPES])
@pytest.mark.parametrize(("least", "most"), [(1, 16), (2, 8)])
def test_every_size_has_its_configuration_and_its_batch(
    config: dict[str, Any], sizes: tuple[int, ...], least: int, most: int
) -> None:
    bounds = (f"++recipes.elastic_policy.min_nodes={least}", f"recipes.elastic_policy.max_nodes={most}")
    config_map, job = rendered(config, ELASTIC, *bounds)
    within = tuple(size for size in sizes if least <= size <= most)
    assert allowed(job) == within, "the operator resolves the sizes of the recipe"
    assert set(config_map["data"]) == {"config.yaml", *(f"config-n{size}.yaml" for size in within)}
    for size in within:
        text = config_map["data"][f"config-n{size}.yaml"]
        present = yaml.safe_load(text)
        assert present["trainer"] == {"devices": RANKS_PER_NODE, "num_nodes": size}
        assert present["training_config"]["training_args"]["max_len"] == 4096, "what a size does not override stays"
        assert present["training_config"]["training_args"]["learning_rate"] in (4e-4, 2.828e-4)
        assert not {"elastic_policy", "scale_config"} & set(present)
        plan = ElasticRecipe.from_config(present).batch_at(size, RANKS_PER_NODE)
        assert (sum(plan.local_sizes), len(plan.local_sizes)) == (GLOBAL_BATCH, size * RANKS_PER_NODE)


@pytest.mark.parametrize(("config", "sizes"), [each[1:] for each in RECIPES[:3]])
def test_a_recipe_that_is_not_elastic_is_a_job_of_fixed_size(config: dict[str, Any], sizes: tuple[int, ...]) -> None:
    config_map, job = rendered(config, "trainer.num_nodes=4")
    assert list(config_map["data"]) == ["config.yaml"]
    assert "elasticPolicy" not in job["spec"]
    assert allowed(job) == (4,)
    assert yaml.safe_load(config_map["data"]["config.yaml"])["training_config"] == config["training_config"]


def test_the_job_is_what_the_launcher_gives_it() -> None:
    config_map, job = rendered(RECIPES[2][1], ELASTIC, "elastic_policy.min_nodes=2", "elastic_policy.max_nodes=8")
    assert config_map["metadata"]["name"] == "training-config-job", "hyp delete removes the ConfigMap of this name"
    spec = job["spec"]
    assert spec["elasticPolicy"] == {
        "minReplicas": 2,
        "maxReplicas": 8,
        "replicaDiscreteValues": [2, 3, 4, 6, 8],
        "scalingTimeoutInSeconds": 600,
        "gracefulShutdownTimeoutInSeconds": 1200,
    }
    (replicas,) = spec["replicaSpecs"]
    assert (spec["nprocPerNode"], replicas["name"], replicas["replicas"], replicas["maxReplicas"]) == (
        "8",
        "2-nodes",
        2,
        8,
    )
    pod = replicas["template"]["spec"]
    (container,) = pod["containers"]
    assert (container["name"], container["image"]) == ("pytorch", OPTIONS.image)
    assert replicas["template"]["metadata"] == {"labels": {"app": "job"}}
    assert container["command"] == ["hyperpodrun", "train.py", "--config-path=/config"]
    assert {"name": "HYPERPOD_SIGNAL_COORDINATION", "value": "distributed"} in container["env"]
    assert container["volumeMounts"] == [{"name": "training-config", "mountPath": "/config"}]
    assert pod["volumes"] == [{"name": "training-config", "configMap": {"name": "training-config-job"}}]


def test_without_graceful_shutdown_nobody_waits_for_a_checkpoint() -> None:
    _, job = rendered(RECIPES[0][1], ELASTIC, "elastic_policy.use_graceful_shutdown=false")
    assert job["spec"]["elasticPolicy"]["gracefulShutdownTimeoutInSeconds"] == 0
    (container,) = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert "env" not in container


def test_sizes_in_steps_have_a_configuration_each() -> None:
    config = {name: value for name, value in RECIPES[0][1].items() if name != "scale_config"}
    config_map, job = rendered(
        config, ELASTIC, "elastic_policy.min_nodes=2", "elastic_policy.max_nodes=8", "elastic_policy.replica_increment_step=2",
        "training_config.training_args.train_batch_size=768",
    )  # fmt: skip
    assert allowed(job) == (2, 4, 6, 8)
    found = {name: yaml.safe_load(text)["trainer"]["num_nodes"] for name, text in config_map["data"].items()}
    assert found == {"config.yaml": 1, **{f"config-n{size}.yaml": size for size in (2, 4, 6, 8)}}


SMALL = recipe("llama", 1, (1, 2, 4), "dpo", 600)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        pytest.param(("elastic_policy.replica_increment_step=1",), "replica_increment_step and scale_config exclude each other",
                     id="a step and values"),
        pytest.param(("elastic_policy.min_nodes=4", "elastic_policy.max_nodes=2"), "min_nodes is 4 but max_nodes is 2; raise one",
                     id="bounds the wrong way round"),
        pytest.param(("elastic_policy.max_nodes=8",), r"max_nodes is 8, but scale_config has no block for 8 nodes; .* one of 1, 2, 4$",
                     id="a maximum without a configuration"),
        pytest.param(("elastic_policy.min_nodes=3", "elastic_policy.max_nodes=4"), "add scale_config.3, or set min_nodes to",
                     id="a minimum without a configuration"),
        pytest.param(("trainer.num_nodes=3",), "trainer.num_nodes is 3, but .* start with one of 1, 2, 4$",
                     id="a start without a configuration"),
        pytest.param(("trainer.num_nodes=two",), "trainer.num_nodes is 'two'; it must be a whole number", id="no number of nodes"),
        pytest.param(("scale_config.2.trainer.num_nodes=3",), "scale_config.2.trainer.num_nodes is 3, but its key is 2; set it to 2",
                     id="a block of another size"),
        pytest.param(("training_config.training_args.override_training_dir=false",), "override_training_dir is false at 1 node",
                     id="a folder of its own for each start"),
        pytest.param(("elastic_policy.use_graceful_shutdown=maybe",), "use_graceful_shutdown is 'maybe'; it must be true or false",
                     id="no switch"),
        pytest.param(("elastic_policy.scaling_timeout=-1",), "scaling_timeout is -1; it must be a whole number of seconds", id="no time"),
        pytest.param(("defaults=[base, _self_]",), "defaults names base, which Hydra merges", id="not merged"),
        pytest.param(("defaults=5",), r"defaults is 5; it must be a list, such as \[_self_\]", id="no list"),
        pytest.param(("scale_config.2.training_config=5",), "training_config is 5; it must be a block", id="no block"),
    ],
)  # fmt: skip
def test_a_contradiction_is_refused_with_what_to_change(overrides: tuple[str, ...], text: str) -> None:
    if not any("max_nodes" in override for override in overrides):
        overrides = ("elastic_policy.max_nodes=4", *overrides)
    with pytest.raises(RecipeError, match=text):
        rendered(SMALL, ELASTIC, *overrides)


def test_a_batch_that_does_not_divide_is_refused_with_the_block_that_works() -> None:
    config = recipe("llama", 1, (1, 2, 3), "dpo", 600)
    del config["scale_config"][3]["training_config"]["training_args"]["uneven_batch"]
    with pytest.raises(BatchSizeError) as refusal:
        rendered(config, ELASTIC, "elastic_policy.max_nodes=3")
    said = str(refusal.value)
    assert "train_batch_size 128 does not divide by the 24 data-parallel ranks of 3 nodes" in said
    block = yaml.safe_load(said[said.index("{") : said.index("}") + 1])
    config["scale_config"][3]["training_config"]["training_args"]["uneven_batch"] = block
    rendered(config, ELASTIC, "elastic_policy.max_nodes=3")


def test_a_batch_that_no_size_can_hold_is_refused() -> None:
    small = "training_config.training_args.train_batch_size=12"
    with pytest.raises(BatchSizeError, match=r"at 1 node with 8 ranks each, .* 4 of 16|does not divide by the 8"):
        rendered(SMALL, ELASTIC, "elastic_policy.max_nodes=4", *(f"scale_config.{n}.{small}" for n in (1, 2, 4)))
    config = recipe("llama", 1, (1, 3), "dpo", 600)
    with pytest.raises(
        BatchSizeError, match=r"at 3 nodes with 8 ranks each, .* = 128 samples, but the global batch is 130"
    ):
        rendered(config, ELASTIC, "elastic_policy.max_nodes=3", f"scale_config.3.{small.replace('12', '130')}")


def test_batches_that_differ_between_sizes_are_told() -> None:
    config = overridden(SMALL, [ELASTIC, "elastic_policy.max_nodes=4",
                                "scale_config.4.training_config.training_args.train_batch_size=256"])  # fmt: skip
    (warning,) = check_recipe(config, ranks_per_node=8).warnings
    assert "(1 node: 128, 2 nodes: 128, 4 nodes: 256)" in warning


def test_configurations_that_no_config_map_holds_are_refused() -> None:
    config = {**SMALL, "notes": "x" * 400_000, "elastic_policy": {"is_elastic": True, "min_nodes": 1, "max_nodes": 4}}
    with pytest.raises(RecipeError) as refused:
        configs(check_recipe(config, ranks_per_node=8))
    assert re.sub(r"take 16\d{5} bytes", "take 16 bytes", str(refused.value)) == (
        "the configurations of 3 sizes take 16 bytes, but a ConfigMap holds 1000000; allow fewer sizes, with scale_config or a larger "
        "elastic_policy.replica_increment_step"
    )


def test_overrides_leave_the_recipe_as_it_was() -> None:
    before = copy.deepcopy(SMALL)
    overridden(SMALL, [ELASTIC, "scale_config.2.trainer.num_nodes=9", "new.block=1"])
    assert before == SMALL


ARGUMENTS = ("--image=example.com/train:1", "--script=/opt/train.py --fast")


def test_the_command_prints_what_kubectl_applies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPES[0][1]))
    more = ("--queue=team", "--namespace=ml", "--claim=fsx:/data", "--env=A=b=c", "--instance-type=ml.p5.48xlarge")
    assert main(["render", str(file), ELASTIC, *ARGUMENTS, *more]) == 0
    config_map, job = yaml.safe_load_all(capsys.readouterr().out)
    assert job["metadata"] == {
        "name": "deepseek-0b-sft-lora",
        "namespace": "ml",
        "labels": {"app": "deepseek-0b-sft-lora", "kueue.x-k8s.io/queue-name": "team"},
    }
    assert config_map["metadata"] == {"name": "training-config-deepseek-0b-sft-lora", "namespace": "ml"}
    pod = job["spec"]["replicaSpecs"][0]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["command"] == ["hyperpodrun", "/opt/train.py", "--fast", "--config-path=/config"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert {"name": "A", "value": "b=c"} in container["env"]
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "ml.p5.48xlarge"}
    assert {"name": "fsx-volume", "persistentVolumeClaim": {"claimName": "fsx"}} in pod["volumes"]


def test_a_claim_may_be_mounted_twice_and_have_any_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, long = tmp_path / "recipe.yaml", "a" * 60
    file.write_text(yaml.safe_dump(RECIPES[0][1]))
    claims = (
        "--claim=fsx:/checkpoints", "--claim=my.claim:/logs", "--claim=fsx:/data", f"--claim={long}:/long", "--claim=my.claim:/more",
    )  # fmt: skip
    assert main(["render", str(file), ELASTIC, *ARGUMENTS, *claims]) == 0
    _, job = yaml.safe_load_all(capsys.readouterr().out)
    pod = job["spec"]["replicaSpecs"][0]["template"]["spec"]
    mounts = [(each["name"], each["mountPath"]) for each in pod["containers"][0]["volumeMounts"][1:]]
    assert mounts == [
        ("fsx-volume", "/checkpoints"), ("claim-2", "/logs"), ("fsx-volume", "/data"), ("claim-3", "/long"), ("claim-2", "/more"),
    ]  # fmt: skip
    volumes = [(each["name"], each["persistentVolumeClaim"]["claimName"]) for each in pod["volumes"][1:]]
    assert volumes == [("fsx-volume", "fsx"), ("claim-2", "my.claim"), ("claim-3", long)]


def test_a_script_that_is_no_line_of_words_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPES[0][1]))
    assert main(["render", str(file), ELASTIC, "--image=i", "--script=/t.py 'x"]) == 1
    told = capsys.readouterr().err
    assert told.endswith('--script "/t.py \'x" cannot be divided into words: No closing quotation\n')


def test_a_recipe_for_trainium_has_more_ranks_than_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("run: {name: neuron}\ntrainer: {num_nodes: 2, devices: 32}\n")
    more = ("--resource=aws.amazon.com/neurondevice=16", "--instance-type=ml.trn1.32xlarge")
    assert main(["render", str(file), *ARGUMENTS, *more]) == 0
    _, job = yaml.safe_load_all(capsys.readouterr().out)
    assert job["spec"]["nprocPerNode"] == "32"
    (container,) = job["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert container["resources"]["requests"] == {"aws.amazon.com/neurondevice": "16"}


def test_the_configuration_of_every_size_says_how_many_ranks_a_node_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    sizes = "elastic_policy.max_nodes=4"
    assert main(["render", str(file), ELASTIC, sizes, "--name=a", "--ranks-per-node=2", *ARGUMENTS]) == 0
    config_map, job = yaml.safe_load_all(capsys.readouterr().out)
    assert job["spec"]["nprocPerNode"] == "2"
    found = {name: yaml.safe_load(text)["trainer"]["devices"] for name, text in config_map["data"].items()}
    assert len(found) > 1
    assert set(found.values()) == {2}


def test_a_size_with_another_number_of_ranks_in_each_node_is_refused() -> None:
    devices = f"scale_config.{max(SMALL['scale_config'])}.trainer.devices"
    small = overridden(SMALL, [ELASTIC, "elastic_policy.max_nodes=4"])
    with pytest.raises(RecipeError, match=rf"{devices} is 4, but .* 8 workers at every size; leave it out"):
        check_recipe(overridden(small, [f"{devices}=4"]), ranks_per_node=8)
    check_recipe(overridden(small, [f"{devices}=8"]), ranks_per_node=8)


def test_only_sizes_of_whole_model_groups_are_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(RECIPES[0][1]))
    command = ["render", str(file), ELASTIC, *ARGUMENTS, "--model-parallel=16"]
    assert main(command) == 1
    assert (
        "1 node with 8 ranks each form no whole model groups of 16; allow multiples of 2 nodes"
        in capsys.readouterr().err
    )
    assert main([*command, "elastic_policy.min_nodes=2"]) == 0
    _, job = yaml.safe_load_all(capsys.readouterr().out)
    assert job["spec"]["elastipod"] == {"parallelism": 16}
    assert allowed(job) == (2, 4, 8, 16)


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("a: [", (), "it is not YAML at line 1"),
        ("- 1", (), "it holds no recipe; a recipe is a block"),
        ("run: {name: a}", (), "trainer.devices is None; set it to the ranks of a node, or give --ranks-per-node"),
        ("trainer: {devices: 2}", (), "run.name is missing; add it, or give the job a name with --name"),
        ("trainer: {devices: 2}", ("--name=A_b",), "the name of the job is 'A_b'; it must be at most 63 lower-case"),
        (
            "trainer: {devices: 2}",
            ("nonsense",),
            "'nonsense' replaces nothing; write it as elastic_policy.is_elastic=true",
        ),
        ("trainer: {devices: 2}", ("a.b=[",), "the value of 'a.b=[' is not YAML; put it in quotes"),
        ("trainer: {devices: 2}", ("trainer.devices.all=2",), "cannot be set, because devices is 2 and not a block"),
    ],
)
def test_the_command_says_in_one_sentence_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, overrides: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    assert main(["render", str(file), *overrides, *ARGUMENTS]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert every(line.startswith("elastipod recipe: ") for line in some(shown.err.splitlines()))


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["render", str(tmp_path / "none.yaml"), *ARGUMENTS]) == 1
    assert "none.yaml: it cannot be read: No such file or directory" in capsys.readouterr().err
