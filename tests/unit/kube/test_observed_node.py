"""A node as the operator reads it from the API server: what drives pods off it, and who tolerates that."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.unit.core.builders import seconds
from tests.unit.kube.bodies import node_body

from elastipod_operator.kube.node_signals import CONFIGURED, SignalEffect, parse_signals
from elastipod_operator.kube.observed_node import HEALTH_LABEL, disruption_of, observe_node

NOW = datetime(2026, 3, 1, 12, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("body", "disrupted"),
    [
        pytest.param(node_body(), "", id="a healthy node"),
        pytest.param(node_body(unschedulable=True), "", id="a cordoned one"),
        pytest.param(node_body(taints=[{"key": "team", "effect": "NoSchedule"}]), "", id="a taint that keeps newcomers off"),
        pytest.param(node_body(taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]), "",
                     id="the node controller's own taint is judged by the agents"),
        pytest.param(node_body(taints=[{"key": "maintenance", "effect": "NoExecute"}]), "taint maintenance:NoExecute", id="NoExecute"),
        pytest.param(node_body(taints=[{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]),
                     "taint karpenter.sh/disrupted:NoSchedule", id="an announced end"),
        pytest.param(node_body(taints=[{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]),
                     "taint aws-node-termination-handler/spot-itn:NoSchedule", id="a Spot notice"),
        pytest.param(node_body(labels={"sagemaker.amazonaws.com/node-health-status": "UnschedulablePendingReplacement"}),
                     "label sagemaker.amazonaws.com/node-health-status=UnschedulablePendingReplacement", id="a health label"),
        pytest.param(node_body(labels={"sagemaker.amazonaws.com/node-health-status": "Schedulable"}), "", id="a good health label"),
    ],
)  # fmt: skip
def test_what_drives_pods_off_a_node(body: dict[str, Any], disrupted: str) -> None:
    assert observe_node(body, None, NOW).disruption == disrupted


def test_a_notice_of_spot_counts_from_its_first_sight() -> None:
    """Whatever clock dated the taint."""
    now = datetime(2026, 3, 1, 12, tzinfo=UTC)
    notice = {
        "key": "aws-node-termination-handler/spot-itn",
        "effect": "NoSchedule",
        "timeAdded": "2026-03-01T09:00:00Z",
    }
    first = observe_node(node_body(taints=[notice]), None, now)
    assert first.leaves_at == now + timedelta(seconds=120)
    later = observe_node(node_body(taints=[notice], unschedulable=True), first, now + timedelta(seconds=50))
    assert later.leaves_at == first.leaves_at
    assert observe_node(node_body(), later, now).leaves_at is None
    other = {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}
    assert observe_node(node_body(taints=[other]), None, now).leaves_at is None


def test_a_hint_of_the_cloud_drains_nothing_and_keeps_newcomers_away() -> None:
    """A recommendation to rebalance may come hours before a Spot notice, or without one."""
    hint = {"key": "aws-node-termination-handler/rebalance-recommendation", "effect": "NoSchedule"}
    node = observe_node(node_body(taints=[hint]), None, NOW)
    assert (node.disruption, node.cordoned, node.leaves_at) == ("", True, None)
    followed = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}
    assert observe_node(node_body(taints=[hint, followed]), node, NOW).disruption == f"taint {KNOWN}:NoSchedule"


SICK = {"type": "GpuUnhealthy", "status": "True"}
KNOWN = "aws-node-termination-handler/spot-itn"


def announcing(**signs: Any) -> dict[str, Any]:
    body = node_body(labels=signs.get("labels", {}), taints=signs.get("taints", []))
    body["status"]["conditions"] += signs.get("conditions", [])
    body["metadata"]["annotations"] = signs.get("annotations", {})
    return body


QUARANTINED = {
    "quarantineHealthEvent": '[{"version":1,"agent":"gpu-health-monitor","checkName":"GpuXidError","isFatal":true}]',
    "quarantineHealthEventIsCordoned": "True",
}
STATE = "dgxc.nvidia.com/nvsentinel-state"


@pytest.mark.parametrize(
    ("said", "body", "drains", "is_cordoned"),
    [
        ("", announcing(annotations=QUARANTINED), "", True),
        ("", announcing(annotations={"quarantineHealthEvent": ""}), "", False),
        ("", announcing(annotations=QUARANTINED, labels={STATE: "draining"}), f"label {STATE}=draining", True),
        ("", announcing(annotations=QUARANTINED, labels={STATE: "quarantined"}), "", True),
        (f"ignore label {STATE}=draining", announcing(annotations=QUARANTINED, labels={STATE: "draining"}), "", True),
        (
            "drain annotation quarantineHealthEvent",
            announcing(annotations=QUARANTINED), "annotation quarantineHealthEvent", False,
        ),
        ("ignore annotation quarantineHealthEvent", announcing(annotations=QUARANTINED), "", False),
        ("drain condition GpuUnhealthy=True", announcing(conditions=[SICK]), "condition GpuUnhealthy=True", False),
        ("drain condition GpuUnhealthy=False", announcing(conditions=[SICK]), "", False),
        ("stop-placing condition GpuUnhealthy=True", announcing(conditions=[SICK]), "", True),
        ("drain label state=sick", announcing(labels={"state": "sick"}), "label state=sick", False),
        ("drain label state=sick", announcing(labels={"state": "well"}), "", False),
        ("drain taint team", announcing(taints=[{"key": "team", "effect": "NoSchedule"}]), "taint team:NoSchedule", False),
        ("stop-placing taint team", announcing(taints=[{"key": "team", "effect": "NoExecute"}]), "", True),
        (f"ignore taint {KNOWN}", announcing(taints=[{"key": KNOWN, "effect": "NoSchedule"}]), "", False),
        (
            "ignore label sagemaker.amazonaws.com/node-health-status=Unschedulable",
            announcing(labels={"sagemaker.amazonaws.com/node-health-status": "Unschedulable"}), "", False,
        ),
    ],
)  # fmt: skip
def test_an_administrator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, said: str, body: dict[str, Any], drains: str, is_cordoned: bool
) -> None:
    for signal, effect in parse_signals(said).items():
        monkeypatch.setitem(CONFIGURED, signal, effect)
    node = observe_node(body, None, NOW)
    assert (node.disruption, node.cordoned, node.leaves_at) == (drains, is_cordoned, None)
    assert disruption_of(body).reason_for(()) == drains
    assert observe_node(node_body(), None, NOW).cordoned is False


@pytest.mark.parametrize(
    ("said", "body", "closed"),
    [
        ("", announcing(labels={HEALTH_LABEL: "Unschedulable"}), f"label {HEALTH_LABEL}=Unschedulable"),
        ("", announcing(labels={HEALTH_LABEL: "Schedulable"}), ""),
        ("", announcing(annotations=QUARANTINED), "annotation quarantineHealthEvent"),
        ("", announcing(taints=[{"key": KNOWN, "effect": "NoSchedule"}]), ""),
        ("", announcing(taints=[{"key": KNOWN, "effect": "PreferNoSchedule"}]), f"taint {KNOWN}:PreferNoSchedule"),
        ("", announcing(conditions=[SICK]), ""),
        ("drain condition GpuUnhealthy=True", announcing(conditions=[SICK]), "condition GpuUnhealthy=True"),
        ("stop-placing condition GpuUnhealthy=True", announcing(conditions=[SICK]), "condition GpuUnhealthy=True"),
        ("drain taint team", announcing(taints=[{"key": "team", "effect": "NoSchedule"}]), "taint team:NoSchedule"),
        (f"ignore label {HEALTH_LABEL}=Unschedulable", announcing(labels={HEALTH_LABEL: "Unschedulable"}), ""),
    ],
)
def test_what_the_scheduler_does_not_heed(
    monkeypatch: pytest.MonkeyPatch, said: str, body: dict[str, Any], closed: str
) -> None:
    """A taint keeps pods away by itself, unless it only asks, or the administrator means those that tolerate it too."""
    for signal, effect in parse_signals(said).items():
        monkeypatch.setitem(CONFIGURED, signal, effect)
    assert observe_node(body, None, NOW).closed == closed
    body["spec"]["unschedulable"] = True
    assert not observe_node(body, None, NOW).closed, "the scheduler places nothing on a cordoned node"


def test_pods_that_tolerate_a_taint_leave_all_the_same_if_it_is_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    body = announcing(taints=[{"key": "team", "effect": "NoExecute"}])
    assert disruption_of(body).reason_for([{"operator": "Exists"}]) == ""
    monkeypatch.setitem(CONFIGURED, "taint team", SignalEffect.DRAIN)
    assert disruption_of(body).reason_for([{"operator": "Exists"}]) == "taint team:NoExecute"


def test_a_node_is_not_ready_since_it_was_first_seen_so() -> None:
    first = observe_node(node_body(ready="Unknown"), None, NOW)
    assert (first.ready, first.not_ready_since) == (False, NOW)
    assert observe_node(node_body(ready="False"), first, NOW + seconds(60)).not_ready_since == NOW
    back = observe_node(node_body(), first, NOW + seconds(60))
    assert (back.ready, back.not_ready_since) == (True, None)
    assert observe_node(node_body(ready="Unknown"), back, NOW + seconds(90)).not_ready_since == NOW + seconds(90)


def test_out_of_service_is_read_and_is_no_drain() -> None:
    fact = observe_node(
        node_body(taints=[{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]), None, NOW
    )
    assert (fact.out_of_service, fact.disruption) == (True, "")


@pytest.mark.parametrize(
    ("toleration", "stays"),
    [
        pytest.param({"operator": "Exists"}, True, id="everything"),
        pytest.param({"key": "maintenance", "operator": "Exists"}, True, id="the key"),
        pytest.param({"key": "maintenance", "value": "x"}, True, id="key and value"),
        pytest.param({"key": "maintenance", "value": "y"}, False, id="another value"),
        pytest.param({"key": "other", "operator": "Exists"}, False, id="another key"),
        pytest.param({"operator": "Exists", "effect": "NoSchedule"}, False, id="another effect"),
        pytest.param({"operator": "Exists", "tolerationSeconds": 300}, False, id="for a while only"),
    ],
)
def test_who_tolerates_a_taint_may_stay(toleration: dict[str, Any], stays: bool) -> None:
    disruption = disruption_of(node_body(taints=[{"key": "maintenance", "value": "x", "effect": "NoExecute"}]))
    assert (disruption.reason_for([toleration]) == "") is stays
