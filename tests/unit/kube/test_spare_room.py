"""How many more pods fit on a node, as the scheduler's filters see it."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod_operator.kube.spare_room import may_host, places, requests_of

GPU = "nvidia.com/gpu"


def container(name: str = "train", **resources: Any) -> dict[str, Any]:
    return {"name": name, "image": "train:1", "resources": resources}


def template(**spec: Any) -> dict[str, Any]:
    """A pod with one GPU and one CPU; keywords are fields of its spec."""
    return {"containers": [container(requests={"cpu": "1"}, limits={GPU: "1"})], **spec}


def node(labels: dict[str, str] | None = None, ready: str = "True", **spec: Any) -> dict[str, Any]:
    """A node with four GPUs; keywords are fields of its spec."""
    return {
        "metadata": {"name": "n1", "labels": {"kubernetes.io/hostname": "n1", **(labels or {})}},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": "3900m", "memory": "16Gi", GPU: "4", "pods": "10"},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def on(spec: dict[str, Any]) -> dict[str, Any]:
    return {"spec": spec}


def selecting(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [*terms]}}
    return template(affinity={"nodeAffinity": required})


def expression(key: str, operator: str, *values: str) -> dict[str, Any]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": [*values]}]}


TAINT = {"key": "spot", "value": "yes", "effect": "NoSchedule"}
EXPELS = {**TAINT, "effect": "NoExecute"}


@pytest.mark.parametrize(
    ("pod", "there", "may"),
    [
        pytest.param(template(), node(), True, id="a plain node"),
        pytest.param(template(), node(ready="False"), False, id="not ready"),
        pytest.param(template(), node(unschedulable=True), False, id="cordoned"),
        pytest.param(
            template(), node({"sagemaker.amazonaws.com/node-health-status": "Unschedulable"}), False, id="sick"
        ),
        pytest.param(template(), node(taints=[TAINT]), False, id="a taint"),
        pytest.param(template(), node(taints=[{**TAINT, "effect": "PreferNoSchedule"}]), True, id="a mild taint"),
        pytest.param(template(tolerations=[{**TAINT}]), node(taints=[TAINT]), True, id="tolerated"),
        pytest.param(template(tolerations=[{**TAINT, "value": "no"}]), node(taints=[TAINT]), False, id="another value"),
        pytest.param(
            template(tolerations=[{"key": "spot", "operator": "Exists"}]), node(taints=[TAINT]), True, id="any value"
        ),
        pytest.param(template(tolerations=[{"operator": "Exists"}]), node(taints=[TAINT]), True, id="any taint"),
        pytest.param(template(), node(taints=[EXPELS]), False, id="a taint that expels"),
        pytest.param(template(tolerations=[{**EXPELS}]), node(taints=[EXPELS]), True, id="one that is tolerated"),
        pytest.param(
            template(tolerations=[{**EXPELS, "tolerationSeconds": 300}]), node(taints=[EXPELS]), False, id="for a while"
        ),
        pytest.param(
            template(tolerations=[{"operator": "Exists"}]),
            node(taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]), False, id="its end is announced",
        ),
        pytest.param(template(nodeSelector={"zone": "a"}), node({"zone": "a"}), True, id="selected"),
        pytest.param(template(nodeSelector={"zone": "a"}), node({"zone": "b"}), False, id="not selected"),
        pytest.param(selecting(expression("zone", "In", "a", "b")), node({"zone": "b"}), True, id="In"),
        pytest.param(selecting(expression("zone", "NotIn", "a")), node({"zone": "a"}), False, id="NotIn"),
        pytest.param(selecting(expression("zone", "NotIn", "a")), node(), True, id="NotIn without the label"),
        pytest.param(selecting(expression("zone", "Exists")), node(), False, id="Exists"),
        pytest.param(selecting(expression("zone", "DoesNotExist")), node(), True, id="DoesNotExist"),
        pytest.param(selecting(expression("gpus", "Gt", "3")), node({"gpus": "4"}), True, id="Gt"),
        pytest.param(selecting(expression("gpus", "Lt", "3")), node({"gpus": "4"}), False, id="Lt"),
        pytest.param(
            selecting(expression("zone", "In", "a"), expression("zone", "In", "b")), node({"zone": "b"}), True, id="or"
        ),
        pytest.param(
            selecting({"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["n1"]}]}), node(), False,
            id="by name",
        ),
    ],
)  # fmt: skip
def test_where_pods_may_go(pod: dict[str, Any], there: dict[str, Any], may: bool) -> None:
    assert may_host(pod, there) is may


def test_avoided_nodes_are_none() -> None:
    assert not may_host(template(), node(), ("n1",))


def test_nor_are_those_that_new_pods_avoid_for_what_they_announce() -> None:
    announces = node()
    announces["metadata"]["annotations"] = {"quarantineHealthEvent": "{}"}
    assert not may_host(template(), announces)


@pytest.mark.parametrize(
    ("pod", "others", "most", "fit"),
    [
        pytest.param(template(), [], 9, 3, id="the scarcest resource decides: 3.9 CPUs"),
        pytest.param(template(), [], 2, 2, id="no more than asked for"),
        pytest.param(template(), [template()], 9, 2, id="pods that are there need theirs"),
        pytest.param(template(), [{"containers": [container(limits={GPU: "4"})]}], 9, 0, id="a limit is a request"),
        pytest.param({"containers": [container()]}, [], 99, 10, id="the number of pods is limited too"),
        pytest.param({"containers": [container(requests={"amd.com/gpu": "1"})]}, [], 9, 0, id="no such device"),
        pytest.param({"containers": [container(requests={"cpu": "no"})]}, [], 3, 3, id="no number"),
        pytest.param(
            template(hostNetwork=True, containers=[{**container(), "ports": [{"containerPort": 8080}]}]), [], 9, 1,
            id="one agent per host network",
        ),
        pytest.param(
            template(hostNetwork=True, containers=[{**container(), "ports": [{"containerPort": 8080}]}]),
            [template(containers=[{**container(), "ports": [{"containerPort": 80, "hostPort": 8080}]}])], 9, 0,
            id="its port is taken",
        ),
    ],
)  # fmt: skip
def test_how_many_fit(pod: dict[str, Any], others: list[dict[str, Any]], most: int, fit: int) -> None:
    assert places(pod, node(), map(on, others), most) == fit


def test_init_containers_count_where_they_need_more_and_sidecars_always() -> None:
    spec = {
        "initContainers": [
            {**container("proxy", requests={"cpu": "1"}), "restartPolicy": "Always"},
            container("fetch", requests={"cpu": "3", "memory": "1Gi"}),
        ],
        "containers": [container(requests={"cpu": "2", "memory": "2Gi"})],
        "overhead": {"cpu": "500m"},
    }
    found = requests_of(spec)
    assert {name: float(amount) for name, amount in found.items()} == {"cpu": 4.5, "memory": 2 * 2**30, "pods": 1}
