"""Queues as Kueue has them: what is read of them, and how much a ClusterQueue can ever have."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod_operator.core.queue_facts import FlavorCapacity, PodRequests
from elastipod_operator.kube.cluster_queues import QueueTable
from elastipod_operator.kube.needs import pod_needs, thousandths

Body = dict[str, Any]


def quota(nominal: int, borrow: int | None = None, lend: int | None = None) -> Body:
    found: Body = {"name": "gpu", "nominalQuota": str(nominal)}
    if borrow is not None:
        found["borrowingLimit"] = str(borrow)
    if lend is not None:
        found["lendingLimit"] = str(lend)
    return found


def holder(name: str, resource: Body | None = None, **spec: Any) -> Body:
    """Give a ClusterQueue or a Cohort with quota of one flavor."""
    groups = [{"coveredResources": ["gpu"], "flavors": [{"name": "f", "resources": [resource]}]}] if resource else []
    return {"metadata": {"name": name}, "spec": {"resourceGroups": groups, **spec}}


def local(name: str = "queue", leads_to: str = "team", **more: Any) -> Body:
    spec = {"clusterQueue": leads_to, **more.pop("spec", {})}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": spec, **more}


def inactive(reason: str, message: str) -> Body:
    return {"conditions": [{"type": "Active", "status": "False", "reason": reason, "message": message}]}


def most(*queues: Body, cohorts: list[Body] | None = None) -> int | None:
    """Give the most that ClusterQueue team can have, in whole units; None where it cannot be told."""
    behind = QueueTable([local()], queues, cohorts or []).fact("ns", "queue", {}).cluster_queue
    assert behind is not None
    return behind.groups[0][0].most[0][1] // 1000 if behind.groups else None


@pytest.mark.parametrize(
    ("queues", "cohorts", "expected"),
    [
        pytest.param([holder("team", quota(4))], [], 4, id="its own"),
        pytest.param(
            [holder("team", quota(4), cohortName="c"), holder("b", quota(8), cohortName="c")],
            [],
            12,
            id="and what others lend",
        ),
        pytest.param(
            [holder("team", quota(4, borrow=2), cohortName="c"), holder("b", quota(8), cohortName="c")],
            [],
            6,
            id="as far as it may borrow",
        ),
        pytest.param(
            [holder("team", quota(4), cohortName="c"), holder("b", quota(8, lend=3), cohortName="c")],
            [],
            7,
            id="as far as they lend",
        ),
        pytest.param(
            [holder("team", quota(4, lend=1), cohortName="c"), holder("b", quota(8), cohortName="c")],
            [],
            12,
            id="what it does not lend is its own",
        ),
        pytest.param(
            [holder("team", quota(4), cohortName="c")], [holder("c", quota(10))], 14, id="a cohort has quota too"
        ),
        pytest.param(
            [holder("team", quota(4), cohortName="c"), holder("b", quota(8), cohortName="d")],
            [holder("c", parentName="top"), holder("d", parentName="top")],
            12,
            id="cohorts lend to each other",
        ),
        pytest.param(
            [holder("team", quota(4), cohortName="c"), holder("b", quota(8), cohortName="top")],
            [holder("c", quota(1, borrow=2), parentName="top")],
            7,
            id="a cohort may not borrow more",
        ),
        pytest.param(
            [holder("team", quota(4), cohortName="c"), holder("b", quota(8), cohortName="d")],
            [holder("c", parentName="top"), holder("d", quota(0, lend=5), parentName="top")],
            9,
            id="nor another lend more",
        ),
        pytest.param(
            [holder("team", quota(4), cohortName="c")],
            [holder("c", parentName="d"), holder("d", parentName="c")],
            None,
            id="cohorts in a circle",
        ),
    ],
)
def test_the_most_that_a_queue_can_have(queues: list[Body], cohorts: list[Body], expected: int | None) -> None:
    assert most(*queues, cohorts=cohorts) == expected


def test_without_the_right_to_read_cohorts_nobody_knows_what_is_lent() -> None:
    for spec, known in (({}, True), ({"cohortName": "c"}, False)):
        table = QueueTable([local()], [holder("team", quota(4), **spec)], None)
        behind = table.fact("ns", "queue", {}).cluster_queue
        assert behind is not None
        assert bool(behind.groups) is known


def test_without_the_right_to_read_cluster_queues_only_the_local_one_is_known() -> None:
    fact = QueueTable([local(spec={"stopPolicy": "Hold"})], None, None).fact("ns", "queue", {})
    assert (fact.exists, fact.stop, fact.cluster_queue) == (True, "Hold", None)


def test_what_is_missing() -> None:
    table = QueueTable([local()], [], [])
    assert not table.fact("ns", "other", {}).exists
    assert not table.fact("elsewhere", "queue", {}).exists
    behind = table.fact("ns", "queue", {}).cluster_queue
    assert behind is not None
    assert (behind.name, behind.exists) == ("team", False)


def test_what_is_read_of_a_queue() -> None:
    queue = holder(
        "team",
        quota(1),
        stopPolicy="HoldAndDrain",
        queueingStrategy="StrictFIFO",
        preemption={"withinClusterQueue": "LowerPriority"},
    )
    queue["status"] = inactive("Stopped", "is stopped")
    table = QueueTable(
        [local(status=inactive("ClusterQueueIsInactive", "not active"), spec={"stopPolicy": "None"})], [queue], []
    )
    assert table.flavors_of("ns", "queue") == ["f"]
    fact = table.fact("ns", "queue", {"f": {"spec": {"nodeLabels": {"kind": "p5"}}}})
    behind = fact.cluster_queue
    assert behind is not None
    assert (fact.stop, fact.inactive) == ("", "ClusterQueueIsInactive: not active")
    assert (behind.stop, behind.inactive, behind.can_preempt_within, behind.is_strict) == (
        "HoldAndDrain",
        "Stopped: is stopped",
        True,
        True,
    )
    assert behind.groups == ((FlavorCapacity("f", (("gpu", 1000),), (("kind", "p5"),)),),)


def test_kueues_defaults() -> None:
    behind = QueueTable([local()], [holder("team")], []).fact("ns", "queue", {}).cluster_queue
    assert behind is not None
    assert (behind.stop, behind.inactive, behind.can_preempt_within, behind.is_strict, behind.cohort) == (
        "",
        "",
        False,
        False,
        "",
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", 1000),
        (2, 2000),
        ("500m", 500),
        ("1.5", 1500),
        ("1Ki", 1024000),
        ("2M", 2 * 10**9),
        ("1e3", 10**6),
        ("1E", 10**21),
        ("1E3", 10**6),
        ("100u", 1),
        ("0", 0),
        (None, None),
        ("", None),
        ("many", None),
        (True, None),
        ("1Kx", None),
        ("nan", None),
        ("9E", 9 * 10**21),
        # The CRD lets these through; to write the last one out takes minutes.
        ("1e999999", None),
        ("1e999990", None),
    ],
)
def test_quantities(text: Any, expected: int | None) -> None:
    assert thousandths(text) == expected


def spec(**pod: Any) -> Body:
    return {"replicaSpecs": [{"name": "workers", "template": {"spec": pod}}]}


def container(cpu: str = "", limits: Body | None = None, **more: Any) -> Body:
    return {"resources": {"requests": {"cpu": cpu} if cpu else {}, "limits": limits or {}}, **more}


@pytest.mark.parametrize(
    ("pod", "cpu"),
    [
        pytest.param({"containers": [container("1"), container("2")]}, 3000, id="containers run together"),
        pytest.param(
            {"containers": [container(limits={"cpu": "2"})]}, 2000, id="a limit is a request where none is named"
        ),
        pytest.param({"containers": [container("1", {"cpu": "2"})]}, 1000, id="a request is what counts"),
        pytest.param(
            {"containers": [container("1")], "initContainers": [container("3"), container("2")]},
            3000,
            id="starters run before them",
        ),
        pytest.param(
            {
                "containers": [container("1")],
                "initContainers": [container("3", restartPolicy="Always"), container("2")],
            },
            5000,
            id="beside the sidecars",
        ),
        pytest.param(
            {"containers": [container("1")], "initContainers": [container("3", restartPolicy="Always")]},
            4000,
            id="as do containers",
        ),
        pytest.param({"containers": [container("1")], "overhead": {"cpu": "250m"}}, 1250, id="overhead"),
        pytest.param(
            {"containers": [container("1")], "resources": {"requests": {"cpu": "4"}}}, 4000, id="resources of the pod"
        ),
    ],
)
def test_what_a_pod_takes(pod: Body, cpu: int) -> None:
    assert pod_needs(spec(**pod)) == (PodRequests("workers", (("cpu", cpu),)),)


def test_where_pods_want_to_be() -> None:
    (found,) = pod_needs(spec(containers=[container()], nodeSelector={"kind": "p5"}))
    assert (found.amounts, found.selector) == ((), (("kind", "p5"),))
