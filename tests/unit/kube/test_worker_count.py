"""How many workers a pod starts, as its template and spec say it before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod_operator.api import JobSpec
from elastipod_operator.core.sizes import SizeError
from elastipod_operator.kube.job_policy import policy_of
from elastipod_operator.kube.templates import worker_count


def spec_of(nproc: str, container: dict[str, Any], **more: Any) -> JobSpec:
    template = {"spec": {"containers": [{"name": "trainer", "image": "train:1", **container}]}}
    return JobSpec.model_validate(
        {"nprocPerNode": nproc, "replicaSpecs": [{"name": "pods", "replicas": 2, "template": template}], **more}
    )


def limits(**resources: object) -> dict[str, Any]:
    return {"resources": {"limits": {name.replace("__", ".com/"): value for name, value in resources.items()}}}


@pytest.mark.parametrize(
    ("nproc", "container", "count"),
    [
        pytest.param("8", {}, 8, id="a number"),
        pytest.param("auto", limits(nvidia__gpu=4), 4, id="NVIDIA"),
        pytest.param("auto", limits(amd__gpu="8"), 8, id="AMD"),
        pytest.param("auto", {"resources": {"requests": {"aws.amazon.com/neurondevice": 16}}}, 16, id="Neuron"),
        pytest.param("auto", limits(**{"aws.amazon__neuron": "16"}), 16, id="Neuron, by its other name"),
        pytest.param("auto", limits(**{"aws.amazon__neuroncore": 2}), 2, id="some cores of a Neuron device"),
        pytest.param("auto", {}, None, id="auto without devices"),
        pytest.param("cpu", {}, None, id="the CPUs of a node"),
        pytest.param("auto", limits(nvidia__gpu="0"), None, id="a CPU job"),
        pytest.param("auto", limits(nvidia__gpu=4, amd__gpu=2), None, id="two kinds of devices"),
        pytest.param("auto", {"env": [{"name": "NPROC_PER_NODE", "value": "2"}]}, 2, id="a variable of the template"),
        pytest.param("8", {"command": ["hyperpodrun", "--nproc-per-node=4", "train.py"]}, 4, id="an option in the command"),
    ],
)  # fmt: skip
def test_the_number_of_workers(nproc: str, container: dict[str, Any], count: int | None) -> None:
    assert worker_count(spec_of(nproc, container), "trainer") == count


def test_sizes_count_requested_devices_as_workers() -> None:
    elastic = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 6}, "elastipod": {"parallelism": 16}}
    assert tuple(policy_of(spec_of("auto", limits(nvidia__gpu=8), **elastic)).sizes.allowed) == (2, 4, 6)
    with pytest.raises(SizeError, match="nothing says how many workers a pod has"):
        policy_of(spec_of("auto", {}, **elastic))
