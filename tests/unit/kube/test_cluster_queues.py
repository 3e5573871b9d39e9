"""LocalQueues and ClusterQueues, read into facts."""

from __future__ import annotations

from typing import Any

from elastipod_operator.kube.cluster_queues import QueueTable

Body = dict[str, Any]


def cluster_queue(name: str = "team", **spec: Any) -> Body:
    return {"metadata": {"name": name}, "spec": spec}


def local(name: str = "queue", leads_to: str = "team", **more: Any) -> Body:
    spec = {"clusterQueue": leads_to, **more.pop("spec", {})}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": spec, **more}


def inactive(reason: str, message: str) -> Body:
    return {"conditions": [{"type": "Active", "status": "False", "reason": reason, "message": message}]}


def test_without_the_right_to_read_cluster_queues_only_the_local_one_is_known() -> None:
    fact = QueueTable([local(spec={"stopPolicy": "Hold"})], None).fact("ns", "queue")
    assert (fact.exists, fact.stop, fact.cluster_queue) == (True, "Hold", None)


def test_what_is_missing() -> None:
    table = QueueTable([local()], [])
    assert not table.fact("ns", "other").exists
    assert not table.fact("elsewhere", "queue").exists
    behind = table.fact("ns", "queue").cluster_queue
    assert behind is not None
    assert (behind.name, behind.exists) == ("team", False)


def test_what_is_read_of_a_queue() -> None:
    queue = cluster_queue(
        stopPolicy="HoldAndDrain",
        queueingStrategy="StrictFIFO",
        preemption={"withinClusterQueue": "LowerPriority"},
    )
    queue["status"] = inactive("Stopped", "is stopped")
    table = QueueTable(
        [local(status=inactive("ClusterQueueIsInactive", "not active"), spec={"stopPolicy": "None"})], [queue]
    )
    fact = table.fact("ns", "queue")
    behind = fact.cluster_queue
    assert behind is not None
    assert (fact.stop, fact.inactive) == ("", "ClusterQueueIsInactive: not active")
    assert (behind.stop, behind.inactive, behind.can_preempt_within, behind.is_strict) == (
        "HoldAndDrain",
        "Stopped: is stopped",
        True,
        True,
    )


def test_kueues_defaults() -> None:
    behind = QueueTable([local()], [cluster_queue()]).fact("ns", "queue").cluster_queue
    assert behind is not None
    assert (behind.stop, behind.inactive, behind.can_preempt_within, behind.is_strict) == ("", "", False, False)
