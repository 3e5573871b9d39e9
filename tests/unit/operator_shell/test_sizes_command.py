"""`elastipod sizes`: what a job may train at, and what quota that takes, before it is applied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastipod_operator.sizes_command import main

GPUS = {"requests": {"cpu": "500m", "memory": "1536Mi"}, "limits": {"nvidia.com/gpu": 8, "memory": "2Gi"}}


def job(*, specs: list[dict[str, Any]] | None = None, pod: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "trainer", "image": "train:1", "resources": GPUS}], **(pod or {})}}
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": "llm"},
        "spec": {
            "nprocPerNode": "8",
            "replicaSpecs": [{"template": template, **one} for one in specs or [{"name": "pods", "replicas": 2}]],
            **spec,
        },
    }


ELASTIC: dict[str, Any] = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 6}, "elastipod": {"parallelism": 16}}


def run(tmp_path: Path, *bodies: object, arguments: tuple[str, ...] = ()) -> int:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump_all(bodies))
    return main(["-f", str(file), *arguments])


def as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: dict[str, Any], *arguments: str
) -> dict[str, Any]:
    assert run(tmp_path, body, arguments=("-o", "json", *arguments)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_the_table_names_every_size_with_its_quota(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap"}
    assert run(tmp_path, config_map, job(**ELASTIC)) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "llm",
        "REPLICAS   WORKERS  MODEL GROUPS  QUOTA",
        "2 (start)  16       1             cpu 1, memory 3Gi, nvidia.com/gpu 16",
        "4          32       2             cpu 2, memory 6Gi, nvidia.com/gpu 32",
        "6          48       3             cpu 3, memory 9Gi, nvidia.com/gpu 48",
    ]
    assert "of the sizes [1, 2, 3, 4, 5, 6] the job uses [2, 4, 6]: 1 replica of 8 workers makes 8 ranks" in shown.err


def test_only_sizes_that_can_train_the_batch_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = as_json(tmp_path, capsys, job(**ELASTIC), "--global-batch=2")
    assert [row["replicas"] for row in few["sizes"]] == [2, 4]
    even = as_json(tmp_path, capsys, job(**ELASTIC), "--global-batch=4", "--even")
    assert [row["replicas"] for row in even["sizes"]] == [2, 4]
    hsdp = as_json(tmp_path, capsys, job(**ELASTIC), "--global-batch=32", "--even", "--shard=16")
    assert [(row["replicas"], row["modelGroups"]) for row in hsdp["sizes"]] == [(2, 1), (4, 2)]


def test_the_quota_is_that_of_all_pods_as_the_scheduler_counts_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pod = {
        "initContainers": [
            {"name": "log", "restartPolicy": "Always", "resources": {"requests": {"cpu": 1}}},
            {"name": "fetch", "resources": {"requests": {"cpu": "3500m", "memory": "100M"}}},
        ],
        "overhead": {"cpu": "100m"},
    }
    specs = [{"name": "base", "replicas": 1, "spares": 1}, {"name": "elastic", "replicas": 0, "maxReplicas": 2}]
    found = as_json(tmp_path, capsys, job(specs=specs, pod=pod, elasticPolicy={"minReplicas": 1, "maxReplicas": 3}))
    assert [row["quota"]["cpu"] for row in found["sizes"]] == ["9.2", "13.8", "18.4"], (
        "the init container beside the sidecar"
    )
    assert [row["quota"]["nvidia.com/gpu"] for row in found["sizes"]] == ["16", "24", "32"], "the spare counts"


def test_a_job_that_does_not_say_its_workers_has_sizes_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = job(nprocPerNode="cpu")
    (row,) = as_json(tmp_path, capsys, body)["sizes"]
    assert (row["replicas"], row["workers"], row["modelGroups"]) == (2, None, None)
    assert run(tmp_path, body, arguments=("--global-batch=8",)) == 1
    assert "nothing says how many workers a pod has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "arguments", "said"),
    [
        pytest.param("a: [", (), "it holds no HyperPodPyTorchJob", id="no job"),
        pytest.param(job(elastipod={"parallelism": 32}), (), "sizes that fit: 4, 8", id="a size that splits a group"),
        pytest.param(job(elasticPolicy={"minReplicas": 3, "maxReplicas": 2}), (), "minReplicas is 3 but maxReplicas is 2", id="bounds"),
        pytest.param(job(), ("--global-batch=8",), "at least 16, or allow smaller sizes", id="too small a batch"),
        pytest.param(job(), ("--global-batch=20", "--even"), "use a multiple of 16, or uneven parts", id="an uneven batch"),
        pytest.param({**job(), "metadata": {}}, (), "metadata.name is missing; add it", id="no name"),
        pytest.param(job(pod={"overhead": {"cpu": "many"}}), (), "resources of a container cannot be read", id="a quantity that is none"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: object, arguments: tuple[str, ...], said: str
) -> None:
    assert run(tmp_path, body, arguments=arguments) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1


def test_files_that_cannot_be_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-f", str(tmp_path / "none.yaml")]) == 1
    (tmp_path / "bad.yaml").write_text("a: [")
    assert main(["-f", str(tmp_path / "bad.yaml")]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "none.yaml: it cannot be read: No such file" in first
    assert "bad.yaml: it is not YAML" in second
