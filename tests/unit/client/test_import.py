"""`elastipod import` converts what has a counterpart and names what has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.nonempty import some
from tests.unit.client.kubeflow_jobs import (
    ELASTIC,
    IN_A_SHELL,
    JOBS,
    MASTER_AND_WORKERS,
    OF_A_RUNTIME,
    RUNTIME,
    TRAIN_JOB,
)

from elastipod import cli
from elastipod_operator.api.models import HyperPodPyTorchJob

EMPTY_RUNTIME = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: torch-distributed}
"""


class Imported:
    """What the command gave for one file."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err
        self.lost = [line.removeprefix("elastipod import: not converted: ") for line in err.splitlines()]

    @property
    def job(self) -> dict[str, Any]:
        (found,) = yaml.safe_load_all(self.out)
        return dict(found)

    @property
    def spec(self) -> dict[str, Any]:
        return dict(self.job["spec"])


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def convert(text: str, *options: str) -> Imported:
        file = tmp_path / "job.yaml"
        file.write_text(text)
        status = cli.main(["import", str(file), *options])
        captured = capsys.readouterr()
        return Imported(status, captured.out, captured.err)

    return convert


@pytest.mark.parametrize("text", JOBS.values(), ids=JOBS)
def test_the_job_is_valid_and_starts_the_agent(imported: Any, text: str) -> None:
    job = HyperPodPyTorchJob.model_validate(imported(text).job)
    for group in some(job.spec.replica_specs):
        commands = [" ".join(one.get("command", [])) for one in group.template["spec"]["containers"]]
        assert any("hyperpodrun" in command for command in commands)


def test_master_and_workers_of_one_template_are_one_group(imported: Any) -> None:
    found = imported(MASTER_AND_WORKERS)
    (group,) = found.spec["replicaSpecs"]
    assert (group["name"], group["replicas"]) == ("worker", 3)
    assert found.spec["nprocPerNode"] == "1", "plain python is one process"
    (container,) = group["template"]["spec"]["containers"]
    assert container["command"] == ["hyperpodrun", "/opt/mnist.py", "--epochs=1"]
    assert group["template"]["metadata"]["annotations"] == {"sidecar.istio.io/inject": "false"}
    assert found.job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus"}
    assert found.spec["runPolicy"] == {"cleanPodPolicy": "None", "ttlSecondsAfterFinished": 60, "jobMaxRetryCount": 3}
    assert found.status == 1
    (line,) = found.lost
    assert line.startswith("mnist: spec.runPolicy.schedulingPolicy: ")


def test_a_master_of_its_own_template_is_a_group_that_stays(imported: Any) -> None:
    text = yaml.safe_dump(_with(MASTER_AND_WORKERS, elastic={"minReplicas": 1, "maxReplicas": 5}, other_image=True))
    spec = imported(text).spec
    assert [(group["name"], group["replicas"], group.get("maxReplicas")) for group in spec["replicaSpecs"]] == [
        ("master", 1, None),
        ("worker", 2, 5),
    ]
    assert spec["elasticPolicy"] == {"minReplicas": 2, "maxReplicas": 6}, "ours count the master"


def _with(text: str, *, elastic: dict[str, int], other_image: bool) -> Any:
    body = json.loads(json.dumps(yaml.safe_load(text)))  # without the alias
    body["spec"]["elasticPolicy"] = elastic
    if other_image:
        body["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["image"] = "example.com/m:1"
    return body


def test_the_bounds_of_an_elastic_job_and_what_its_rendezvous_said(imported: Any) -> None:
    found = imported(ELASTIC)
    (group,) = found.spec["replicaSpecs"]
    assert (group["replicas"], group["maxReplicas"]) == (2, 3)
    assert found.spec["elasticPolicy"] == {"minReplicas": 1, "maxReplicas": 3}
    assert found.spec["runPolicy"] == {"jobMaxRetryCount": 100}
    assert found.spec["nprocPerNode"] == "4"
    assert found.spec["elastipod"] == {"container": "pytorch"}, "the agent is not in the first container"
    assert [line.split(": ")[1] for line in found.lost] == ["spec.elasticPolicy.metrics"]


def test_a_command_in_a_shell(imported: Any) -> None:
    found = imported(IN_A_SHELL)
    (container,) = found.spec["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c", "pip list && hyperpodrun train.py"]
    assert found.spec["nprocPerNode"] == "8"
    assert [line.split(": ")[1] for line in found.lost] == ["spec.pytorchReplicaSpecs.Worker.restartPolicy"]


def test_a_train_job(imported: Any) -> None:
    found = imported(f"{EMPTY_RUNTIME}\n---\n{TRAIN_JOB}")
    assert (found.status, found.err) == (0, "")
    assert found.spec == {
        "nprocPerNode": "2",
        "runPolicy": {"suspend": True},
        "replicaSpecs": [
            {
                "name": "node",
                "replicas": 3,
                "template": {
                    "metadata": {"labels": {"team": "nlp"}},
                    "spec": {
                        "containers": [
                            {
                                "name": "node",
                                "image": "example.com/finetune:1",
                                "command": ["hyperpodrun", "train.py"],
                                "env": [{"name": "EPOCHS", "value": "3"}],
                                "resources": {"limits": {"nvidia.com/gpu": 2}},
                            }
                        ]
                    },
                },
            }
        ],
    }


def test_what_a_runtime_says_is_taken_over(imported: Any) -> None:
    found = imported(OF_A_RUNTIME)
    (group,) = found.spec["replicaSpecs"]
    assert group["replicas"] == 2
    assert group["template"]["spec"]["serviceAccountName"] == "trainer"
    assert group["template"]["spec"]["containers"][0]["image"] == "example.com/torch:2"
    assert [line.split(": ")[1] for line in found.lost] == [
        "ClusterTrainingRuntime/torch-distributed.spec.template.spec.replicatedJobs[dataset-initializer]",
        "spec.initializer",
        "spec.podTemplateOverrides",
    ]


def test_a_train_job_without_its_runtime_has_no_image(imported: Any) -> None:
    body = yaml.safe_load(TRAIN_JOB)
    del body["spec"]["trainer"]["image"]
    found = imported(yaml.safe_dump(body))
    assert "add its manifest to FILE" in found.err
    assert "spec.trainer.image: neither the job nor a runtime has one; replace SET-AN-IMAGE" in found.err
    assert found.status == 1


def test_a_runtime_that_is_not_in_the_file_is_named_though_the_job_has_an_image(imported: Any) -> None:
    found = imported(TRAIN_JOB)
    assert found.status == 1
    (line,) = found.lost
    assert line.startswith("finetune: spec.runtimeRef: ClusterTrainingRuntime torch-distributed is not in the file")


RICH_RUNTIME = """
apiVersion: trainer.kubeflow.org/v1alpha1
kind: ClusterTrainingRuntime
metadata: {name: torch-distributed}
spec:
  mlPolicy: {numNodes: 2, mpi: {numProcPerNode: 8}, torch: {elasticPolicy: {maxNodes: 4}}, novelty: 1}
  podGroupPolicy: {coscheduling: {}}
  template:
    spec:
      successPolicy: {operator: All}
      replicatedJobs:
        - name: launcher
          template: {spec: {template: {spec: {containers: [{name: node, image: "example.com/l:1"}]}}}}
        - name: workers
          replicas: 2
          dependsOn: [{name: launcher}]
          template:
            metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer, tier: gold}}
            spec:
              backoffLimit: 3
              template:
                spec: {containers: [{name: node, image: "example.com/t:1", env: null}]}
"""


def test_what_a_runtime_says_beyond_its_pods_is_named(imported: Any) -> None:
    found = imported(f"{RICH_RUNTIME}\n---\n{TRAIN_JOB}")
    spec = "finetune: ClusterTrainingRuntime/torch-distributed.spec."
    jobs = "template.spec.replicatedJobs"
    assert sorted(line.removeprefix(spec).split(": ")[0] for line in found.lost) == [
        "mlPolicy.mpi",
        "mlPolicy.novelty",
        "mlPolicy.torch.elasticPolicy",
        "podGroupPolicy",
        f"{jobs}[launcher]",
        f"{jobs}[workers].dependsOn",
        f"{jobs}[workers].replicas",
        f"{jobs}[workers].template.metadata.labels.tier",
        f"{jobs}[workers].template.spec.backoffLimit",
        "template.spec.successPolicy",
    ]
    (container,) = found.spec["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "EPOCHS", "value": "3"}], "the runtime's env is null"


def test_runtimes_of_one_name_are_told_apart_by_kind_and_namespace(imported: Any) -> None:
    def runtime(kind: str, namespace: str, image: str) -> dict[str, Any]:
        body = yaml.safe_load(RUNTIME)
        body["kind"], body["metadata"]["namespace"] = kind, namespace
        body["spec"]["template"]["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["containers"][0][
            "image"
        ] = image
        return dict(body)

    def image_of(kind: str, namespace: str) -> str:
        job = yaml.safe_load(TRAIN_JOB)
        del job["spec"]["trainer"]["image"]
        job["metadata"]["namespace"] = namespace
        job["spec"]["runtimeRef"]["kind"] = kind
        bodies = [
            runtime("ClusterTrainingRuntime", "", "cluster"),
            runtime("TrainingRuntime", "team", "team"),
            runtime("TrainingRuntime", "other", "other"),
        ]
        found = imported(yaml.safe_dump_all([*bodies, job]))
        (container,) = found.spec["replicaSpecs"][0]["template"]["spec"]["containers"]
        return str(container["image"])

    assert image_of("ClusterTrainingRuntime", "team") == "cluster"
    assert image_of("TrainingRuntime", "team") == "team"
    assert image_of("TrainingRuntime", "other") == "other"
    assert image_of("TrainingRuntime", "third") == "SET-AN-IMAGE"


def test_a_runtime_that_is_there_twice_is_named(imported: Any) -> None:
    found = imported(f"{EMPTY_RUNTIME}\n---\n{EMPTY_RUNTIME}\n---\n{TRAIN_JOB}")
    assert (
        "the file has ClusterTrainingRuntime torch-distributed more than once; the last one is converted" in found.err
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"env": None}, id="no env"),
        pytest.param({"command": None, "args": None}, id="no command"),
    ],
)
def test_fields_that_are_null_are_absent(imported: Any, change: dict[str, Any]) -> None:
    job, runtime = yaml.safe_load(TRAIN_JOB), yaml.safe_load(RUNTIME)
    job["spec"]["trainer"].update(change)
    runtime["spec"]["template"]["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["containers"][
        0
    ].update(change)
    assert imported(yaml.safe_dump_all([runtime, job])).status == 1


def test_labels_of_a_job_are_added_to_those_of_its_runtime(imported: Any) -> None:
    runtime = yaml.safe_load(RUNTIME)
    runtime["spec"]["template"]["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["metadata"] = {
        "labels": {"a": "b"}
    }
    found = imported(yaml.safe_dump_all([runtime, yaml.safe_load(TRAIN_JOB)]))
    assert found.spec["replicaSpecs"][0]["template"]["metadata"]["labels"] == {"a": "b", "team": "nlp"}


def test_a_command_that_is_not_known_is_left_and_named(imported: Any) -> None:
    found = imported(TRAIN_JOB.replace("[torchrun, train.py]", "[tune, run, recipe.yaml]"))
    (container,) = found.spec["replicaSpecs"][0]["template"]["spec"]["containers"]
    assert container["command"] == ["tune", "run", "recipe.yaml"]
    assert "have the container start hyperpodrun" in found.err


def test_a_field_that_is_not_known_is_named(imported: Any) -> None:
    found = imported(f"{EMPTY_RUNTIME}\n---\n" + TRAIN_JOB.replace("suspend: true", "suspend: true\n  novelty: 1"))
    assert found.lost == ["finetune: spec.novelty: it has no counterpart that is known here"]


def test_several_jobs_and_json(imported: Any) -> None:
    found = imported(f"{TRAIN_JOB}\n---\n{ELASTIC}", "-o", "json")
    assert [item["metadata"]["name"] for item in json.loads(found.out)["items"]] == ["finetune", "imagenet"]
    assert json.loads(imported(TRAIN_JOB, "-o", "json").out)["kind"] == "HyperPodPyTorchJob"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("kind: [", "is not YAML", id="no YAML"),
        pytest.param("", "it holds no job", id="nothing"),
        pytest.param("- 1", "no object of Kubernetes", id="no object"),
        pytest.param("apiVersion: batch/v1\nkind: Job", "Job of batch cannot be converted", id="another kind"),
        pytest.param("a: 1", "an object without a kind of no group cannot be converted", id="no kind"),
        pytest.param("apiVersion: kubeflow.org/v1\nkind: PyTorchJob", "neither Master nor Worker", id="no replicas"),
    ],
)
def test_what_cannot_be_converted_at_all(imported: Any, text: str, message: str) -> None:
    found = imported(text)
    assert (found.status, found.out) == (2, "")
    assert message in found.err


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["import", "/nowhere/job.yaml"]) == 2
    assert "/nowhere/job.yaml cannot be read: No such file or directory" in capsys.readouterr().err


def of_command(*words: str, **spec: Any) -> str:
    pods = {"spec": {"containers": [{"name": "pytorch", "image": "example.com/x:1", "command": list(words)}]}}
    spec = {**spec, "pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": pods}}}
    return json.dumps({"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "j"}, "spec": spec})


def command_of(found: Imported) -> list[str]:
    ((container,),) = [one["template"]["spec"]["containers"] for one in found.spec["replicaSpecs"]]
    HyperPodPyTorchJob.model_validate(found.job)
    return list(container["command"])


@pytest.mark.parametrize(
    ("words", "made"),
    [
        pytest.param(["python", "-uB", "t.py"], ["hyperpodrun", "t.py"], id="options in one word"),
        pytest.param(
            ["python", "-W", "ignore", "t.py", "-x"],
            ["hyperpodrun", "--no-python", "python", "-W", "ignore", "t.py", "-x"],
            id="an option with a value",
        ),
        pytest.param(
            ["/opt/python3.11", "-X", "dev", "-u", "t.py"],
            ["hyperpodrun", "--no-python", "/opt/python3.11", "-X", "dev", "-u", "t.py"],
            id="an interpreter of its own",
        ),
        pytest.param(
            ["python", "-c", "print(1)"], ["hyperpodrun", "--no-python", "python", "-c", "print(1)"], id="a text"
        ),
        pytest.param(["python", "-u", "-m", "a.b", "--x"], ["hyperpodrun", "-m", "a.b", "--x"], id="a module"),
        pytest.param(
            ["python", "-m", "torch.distributed.launch", "--use_env", "--nproc_per_node=4", "t.py", "--use_env"],
            ["hyperpodrun", "--nproc_per_node=4", "t.py", "--use_env"],
            id="an option of launch alone",
        ),
        pytest.param(
            ["bash", "-c", "python -m torch.distributed.launch --use-env --nproc_per_node 4 t.py"],
            ["bash", "-c", "hyperpodrun --nproc_per_node 4 t.py"],
            id="the same in a shell",
        ),
    ],
)
def test_what_is_given_to_python_and_to_launch_stays_or_is_not_needed(
    imported: Any, words: list[str], made: list[str]
) -> None:
    found = imported(of_command(*words))
    assert command_of(found) == made
    assert (found.status, found.lost) == (0, [])


@pytest.mark.parametrize(
    "words",
    [["python", "-m", "torch.distributed.launch", "t.py"], ["sh", "-c", "python3 -m torch.distributed.launch t.py"]],
)
def test_a_script_that_expects_its_local_rank_as_an_argument_is_named(imported: Any, words: list[str]) -> None:
    found = imported(of_command(*words))
    assert command_of(found)[-1].endswith("t.py")
    assert found.lost == [
        "j: spec.pytorchReplicaSpecs.Worker.template: torch.distributed.launch gives --local-rank to the script, which is to read "
        "LOCAL_RANK from the environment instead"
    ]


@pytest.mark.parametrize(
    ("words", "spec", "made"),
    [
        pytest.param(["bash", "-c", 'torchrun --nproc-per-node="8" t.py'], {}, "8", id="quotes"),
        pytest.param(["bash", "-c", "torchrun --nproc_per_node '4' t.py"], {}, "4", id="single quotes"),
        pytest.param(["torchrun", "--nproc-per-node=gpu", "t.py"], {}, "gpu", id="what the operator knows"),
        pytest.param(
            ["bash", "-c", "torchrun --nproc_per_node=$N t.py"], {"nprocPerNode": "2"}, "2", id="the spec counts"
        ),
    ],
)
def test_how_many_workers_a_pod_has_is_read_from_a_command_line(
    imported: Any, words: list[str], spec: dict[str, str], made: str
) -> None:
    found = imported(of_command(*words, **spec))
    assert (found.spec["nprocPerNode"], found.lost) == (made, [])


@pytest.mark.parametrize("value", ["$PET_NPROC_PER_NODE", "${N:-8}", "$(NPROC)"])
@pytest.mark.parametrize("in_shell", [True, False])
def test_a_number_that_only_the_pod_knows_is_named(imported: Any, value: str, in_shell: bool) -> None:
    words = (
        ["bash", "-c", f"torchrun --nproc_per_node={value} t.py"]
        if in_shell
        else ["torchrun", f"--nproc_per_node={value}", "t.py"]
    )
    found = imported(of_command(*words))
    assert found.spec["nprocPerNode"] == "auto"
    assert found.lost == [
        f"j: spec.pytorchReplicaSpecs.Worker.template: --nproc-per-node is {value}, which only the pod knows; write the number there and "
        "into spec.nprocPerNode"
    ]


@pytest.mark.parametrize(
    ("line", "made"),
    [
        pytest.param(
            "torchrun --nproc_per_node=4 --nnodes $WORLD_SIZE --node_rank $RANK --master_addr $MASTER_ADDR "
            "--master_port $MASTER_PORT train.py --lr 1 --master_port 3",
            "hyperpodrun --nproc_per_node=4 train.py --lr 1 --master_port 3",
            id="variables of another operator",
        ),
        pytest.param(
            'set -u; torchrun --nnodes="$WORLD_SIZE" --tee 3 -m --rdzv-conf "a=1,b=2" --rdzv_id=x pkg.train --node_rank $RANK',
            "set -u; hyperpodrun --tee 3 -m pkg.train --node_rank $RANK",
            id="quoted, with flags between",
        ),
        pytest.param(
            "cd /x && torchrun \\\n  --nnodes $N \\\n  --max_restarts 3 \\\n  t.py",
            "cd /x && hyperpodrun \\\n  --max_restarts 3 \\\n  t.py",
            id="over several lines",
        ),
        pytest.param(
            "/opt/conda/bin/torchrun --nproc_per_node=4 t.py", "hyperpodrun --nproc_per_node=4 t.py", id="with its path"
        ),
        pytest.param(
            "python3 -u -m torch.distributed.run --nproc_per_node=4 t.py",
            "hyperpodrun --nproc_per_node=4 t.py",
            id="unbuffered",
        ),
        pytest.param("torchrun t.py & torchrun --node_rank 1 u.py", "hyperpodrun t.py & hyperpodrun u.py", id="two"),
    ],
)
def test_what_the_operator_sets_is_left_out_of_a_shells_line(imported: Any, line: str, made: str) -> None:
    """Its variables are empty in pods of this operator, and the shell would give the next word to the option."""
    found = imported(of_command("bash", "-c", line))
    assert command_of(found) == ["bash", "-c", made]
    assert found.lost == []


def test_python_in_a_shell_is_named(imported: Any) -> None:
    found = imported(of_command("bash", "-c", "pip list && python train.py"))
    assert found.lost == [
        "j: spec.pytorchReplicaSpecs.Worker.template: its shell starts python itself; have the container start hyperpodrun"
    ]
