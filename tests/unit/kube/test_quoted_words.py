"""Words that Kubernetes, autoscalers and health agents use: each of those that the operator knows means what it should."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from tests.unit.kube.bodies import container, node_body, pod_body

from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.observed_node import disruption_of, observe_node
from elastipod_operator.kube.observed_pod import observe_pod
from elastipod_operator.kube.writes import is_refusal

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "key",
    [
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "sagemaker.amazonaws.com/node-health-status",
    ],
)
def test_who_announces_the_end_of_a_node_drives_its_pods_away(key: str) -> None:
    taint = {"key": key, "effect": "NoSchedule"}
    assert observe_node(node_body(taints=[taint]), None, NOW).disruption == f"taint {key}:NoSchedule"


@pytest.mark.parametrize("key", ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"])
def test_the_node_controller_drives_nobody_away(key: str) -> None:
    assert observe_node(node_body(taints=[{"key": key, "effect": "NoExecute"}]), None, NOW).disruption == ""


@pytest.mark.parametrize(
    "status", ["Schedulable", "Unschedulable", "UnschedulablePendingReplacement", "UnschedulablePendingReboot"]
)
def test_a_node_that_leaves_schedulable_is_left(status: str) -> None:
    node = node_body(labels={"sagemaker.amazonaws.com/node-health-status": status})
    assert bool(observe_node(node, None, NOW).disruption) is (status != "Schedulable")


@pytest.mark.parametrize("mine", [{}, {"value": ""}, {"value": None}])
@pytest.mark.parametrize("theirs", [{}, {"value": ""}])
def test_no_value_and_an_empty_one_are_the_same(mine: dict[str, str | None], theirs: dict[str, str]) -> None:
    disruption = disruption_of(node_body(taints=[{"key": "maintenance", "effect": "NoExecute", **theirs}]))
    assert disruption.reason_for([{"key": "maintenance", **mine}]) == ""
    assert disruption.reason_for([{"key": "maintenance", "value": "x"}]) == "taint maintenance:NoExecute"


@pytest.mark.parametrize("status", ["True", "False", "Unknown"])
def test_a_disruption_that_is_not_true_is_none(status: str) -> None:
    told = {"type": "DisruptionTarget", "status": status, "reason": "PreemptionByScheduler"}
    fact = observe_pod(pod_body(status={"phase": "Running", "conditions": [told]}), "train")
    assert fact is not None
    assert fact.disruption == ("PreemptionByScheduler" if status == "True" else "")


@pytest.mark.parametrize(
    ("kubelet", "reason"),
    [
        *((word, "ImagePullFailed") for word in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName")),
        *((word, "ImagePullFailed") for word in ("ErrImageNeverPull", "ImageInspectError")),
        *((word, "ContainerCannotStart") for word in ("CreateContainerConfigError", "CreateContainerError")),
        ("RunContainerError", "ContainerCannotStart"),
        *((word, "") for word in ("ContainerCreating", "PodInitializing")),
    ],
)
def test_what_keeps_a_container_from_its_start(kubelet: str, reason: str) -> None:
    status = {"phase": "Pending", "containerStatuses": [container(waiting={"reason": kubelet, "message": "so it is"})]}
    fact = observe_pod(pod_body(status=status), "train")
    assert fact is not None
    assert fact.problem_reason == reason
    assert ("so it is" in fact.problem) is bool(reason)


@pytest.mark.parametrize(
    ("status", "words", "is_one"),
    [
        pytest.param(400, "admission webhook denied the request", True, id="a webhook that does not say how"),
        pytest.param(403, "exceeded quota: team", True, id="a quota"),
        pytest.param(
            409,
            'Operation cannot be fulfilled on resourcequotas "team": the object has been modified; please apply your changes '
            "to the latest version and try again",
            False,
            id="a quota that is counted for others at the same moment",
        ),
        pytest.param(409, 'pods "job-workers-0" already exists', False, id="a name that is taken"),
        pytest.param(409, 'admission webhook "x" denied the request: busy', True, id="a webhook that says it so"),
        pytest.param(422, "denied request: two pods are enough", True, id="a policy"),
        pytest.param(500, 'failed calling webhook "pods.example.com"', True, id="a webhook that is away"),
        pytest.param(500, "etcdserver: request timed out", False, id="a trouble of its own"),
        pytest.param(429, "too many requests", False, id="too many calls"),
        pytest.param(404, "namespaces not found", False, id="nothing there"),
    ],
)
def test_what_is_a_refusal(status: int, words: str, is_one: bool) -> None:
    """What is none is tried again soon, and not told of."""
    assert is_refusal(ApiError(status, words)) is is_one
    assert not is_refusal(TimeoutError(words))
