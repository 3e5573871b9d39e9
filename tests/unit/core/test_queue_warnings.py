"""Warnings about a job's queue: one sentence and one Event each, gone once the queue is mended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import NOW, acts, job, observed, pid, pod, policy, running, seconds, silent, trains

from elastipod_operator.core.actions import DeleteWorkload, UpdateWorkloadPriority
from elastipod_operator.core.names import workload_name
from elastipod_operator.core.plan import plan
from elastipod_operator.core.queue_facts import ClusterQueueFact, QueueFact
from elastipod_operator.core.queue_warnings import eviction_due_at
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import ObservedNode, ObservedWorkload, Snapshot


def cluster_queue(**changes: Any) -> ClusterQueueFact:
    return replace(ClusterQueueFact(name="team"), **changes)


def queue(**changes: Any) -> QueueFact:
    return replace(QueueFact(name="gpus", cluster_queue=cluster_queue()), **changes)


def workload(number: int, pods: int = 1, **changes: Any) -> ObservedWorkload:
    base = ObservedWorkload(
        name=workload_name("job", "job-uid", number), uid=f"uid-{number}", number=number, counts=(("workers", pods),),
        created_at=NOW - seconds(3600), queue="gpus", reserved=True, admitted=True, pods_ready=True,
    )  # fmt: skip
    return replace(base, **changes)


def waiting(number: int, waits: str = "no room") -> ObservedWorkload:
    return workload(number, reserved=False, admitted=False, pods_ready=None, pending_message=waits)


FOUR = (workload(0, 2), workload(1), workload(2))


def snapshot(about: QueueFact | None, workloads: Sequence[ObservedWorkload] = FOUR, **changes: Any) -> Snapshot:
    """Give an observation of a job of 2 to 4 replicas that trains with all that was granted."""
    size = 1 + sum(w.is_granted for w in workloads)
    pods = [(pod(n, workload=workload_name("job", "job-uid", max(0, n - 1))), running()) for n in range(size)]
    fact = job(replace(trains(size), queue="gpus"), policy(2, 4, payback=False), queue="gpus", **changes)
    return observed(fact, pods, workloads=tuple(workloads), queue_fact=about)


def warning(what: Snapshot) -> tuple[str, str]:
    """Give reason and message of condition Warning; empty without one."""
    found = next((c for c in plan(what).conditions if c.type == "Warning"), None)
    return (found.reason, found.message) if found is not None else ("", "")


def events(what: Snapshot) -> list[str]:
    return [note.reason for note in plan(what).events if note.is_warning]


def test_of_a_queue_that_is_as_it_should_be_nothing_is_told() -> None:
    assert warning(snapshot(queue())) == ("", "")
    assert events(snapshot(queue())) == []
    assert warning(snapshot(None)) == ("", ""), "nor of one that was not read"


@pytest.mark.parametrize(
    ("about", "reason", "words"),
    [
        pytest.param(
            queue(exists=False, cluster_queue=None),
            "QueueMissing",
            "LocalQueue gpus does not exist in namespace team",
            id="no LocalQueue",
        ),
        pytest.param(
            queue(cluster_queue=ClusterQueueFact(name="team", exists=False)),
            "QueueMissing",
            "ClusterQueue team, to which LocalQueue gpus leads, does not exist",
            id="no ClusterQueue",
        ),
        pytest.param(
            queue(stop="Hold", inactive="Stopped: by the admin"),
            "QueueStopped",
            "LocalQueue gpus admits nothing more, and running jobs continue (stopPolicy Hold): Stopped: by the admin",
            id="LocalQueue on hold",
        ),
        pytest.param(
            queue(cluster_queue=cluster_queue(stop="HoldAndDrain", inactive="Stopped: drained")),
            "QueueStopped",
            "ClusterQueue team admits nothing more, and running jobs are evicted (stopPolicy HoldAndDrain): Stopped: drained",
            id="ClusterQueue drained",
        ),
        pytest.param(
            queue(cluster_queue=cluster_queue(inactive="FlavorNotFound: no flavor x")),
            "QueueInactive",
            "ClusterQueue team admits nothing: FlavorNotFound: no flavor x",
            id="no flavor",
        ),
        pytest.param(
            queue(inactive="ClusterQueueIsInactive: it is", cluster_queue=None),
            "QueueInactive",
            "LocalQueue gpus admits nothing: ClusterQueueIsInactive: it is",
            id="what is behind it may not be read",
        ),
        pytest.param(
            queue(cluster_queue=cluster_queue(can_preempt_within=False)),
            "PreemptionNever",
            "preemption.withinClusterQueue Never",
            id="nothing is ever shed",
        ),
    ],
)
def test_what_is_wrong_is_told_and_gone_once_it_is_mended(about: QueueFact, reason: str, words: str) -> None:
    found, text = warning(snapshot(about))
    assert found == reason
    assert words in text
    assert events(snapshot(about)) == [reason]
    told = plan(snapshot(about)).conditions
    assert events(snapshot(about, conditions=told)) == [], "an Event once"
    assert warning(snapshot(queue(), conditions=told)) == ("", "")


def test_several_things_are_told_together_the_most_pressing_first() -> None:
    about = queue(cluster_queue=cluster_queue(stop="Hold", can_preempt_within=False))
    assert warning(snapshot(about))[0] == "QueueStopped"
    assert events(snapshot(about)) == ["QueueStopped", "PreemptionNever"]
    one = plan(snapshot(queue(cluster_queue=cluster_queue(can_preempt_within=False)))).conditions
    assert events(snapshot(about, conditions=one)) == ["QueueStopped"], "of what is new"


TOO_SMALL = (
    "couldn't assign flavors to pod set workers: insufficient quota for nvidia.com/gpu in flavor gpus, "
    "previously considered podsets requests (0) + current podset request (2) > maximum capacity (1)"
)


@pytest.mark.parametrize(
    ("workloads", "condition"),
    [
        pytest.param(
            (replace(waiting(0, TOO_SMALL), counts=(("workers", 2),)),), "Suspended", id="for the minimum size"
        ),
        pytest.param((workload(0, 2), waiting(1, TOO_SMALL)), "Scaling", id="for an increment"),
    ],
)
def test_a_queue_that_is_too_small_is_told_in_the_words_of_kueue(
    workloads: tuple[ObservedWorkload, ...], condition: str
) -> None:
    what = snapshot(queue(), workloads)
    if condition == "Suspended":
        what = replace(what, pods=(), agents={}, job=replace(what.job, record=Record(queue="gpus")))
    found = {c.type: c for c in plan(what).conditions}[condition]
    assert found.reason == "Queued"
    assert "> maximum capacity (1)" in found.message


def test_strict_order_matters_while_increments_wait() -> None:
    about = queue(cluster_queue=cluster_queue(is_strict=True))
    assert warning(snapshot(about)) == ("", "")
    assert warning(snapshot(about, (workload(0, 2), waiting(1), waiting(2))))[0] == "StrictFIFO"
    assert warning(snapshot(about, (workload(0, 2), waiting(1, "")))) == ("", ""), "Kueue has not considered it yet"


def test_a_job_of_one_size_gives_nothing_up_anyway() -> None:
    what = snapshot(queue(cluster_queue=cluster_queue(can_preempt_within=False)), (workload(0, 4),))
    assert warning(replace(what, job=replace(what.job, policy=policy(4, 4)))) == ("", "")


def test_a_job_in_no_queue_is_not_told_of_any() -> None:
    what = snapshot(queue(exists=False), ())
    assert warning(replace(what, job=replace(what.job, queue="", record=trains(1)))) == ("", "")


# ---- quota that should be back

LATE = NOW - seconds(600 + 60)


def taken(**changes: Any) -> ObservedWorkload:
    return workload(2, eviction_reason="Preempted", eviction_message="for another", **changes)


def test_quota_that_is_not_given_back_in_time_is_an_alarm() -> None:
    what = snapshot(queue(), (*FOUR[:2], taken(evicted_at=LATE + seconds(1))))
    stuck = (pod(3, workload=workload_name("job", "job-uid", 2)), running())
    what = replace(what, pods=(*what.pods, stuck[0]), agents={**what.agents, stuck[0].name: stuck[1]})
    assert warning(what) == ("", "")
    assert eviction_due_at(what.workloads[2], policy()) == NOW + seconds(1)
    assert plan(what).wake_at is not None
    assert plan(what).wake_at <= NOW + seconds(1)  # type: ignore[operator]
    late = replace(what, now=NOW + seconds(1))
    name = workload_name("job", "job-uid", 2)
    text = f"Kueue has waited for the quota of Workload {name} since 11:49:01 UTC (Preempted)"
    assert warning(late) == (
        "EvictionOverdue",
        f"{text}; it is blocked by pod job-workers-3 on node node-3 (still running)",
    )
    assert events(late) == ["EvictionOverdue"]


@pytest.mark.parametrize(
    ("changes", "agent", "node", "how"),
    [
        pytest.param({"kill_at": NOW}, running(), None, "(being deleted)", id="deleted"),
        pytest.param({}, silent(), None, "(its agent does not answer)", id="silent"),
        pytest.param(
            {},
            running(),
            ObservedNode(name="node-3", ready=False, not_ready_since=NOW),
            "(the node is not ready)",
            id="its node",
        ),
        pytest.param({"node": ""}, None, None, "job-workers-3 (without a node)", id="never placed"),
    ],
)
def test_who_holds_it_up(changes: dict[str, Any], agent: Any, node: ObservedNode | None, how: str) -> None:
    what = snapshot(queue(), (*FOUR[:2], taken(evicted_at=LATE)))
    one = pod(pid(3), workload=workload_name("job", "job-uid", 2), **changes)
    agents = {**what.agents, **({one.name: agent} if agent is not None else {})}
    nodes = {**what.nodes, "node-3": node or ObservedNode(name="node-3")}
    assert how in warning(replace(what, pods=(*what.pods, one), agents=agents, nodes=nodes))[1]


def test_quota_that_could_not_be_given_back_is_an_alarm_too() -> None:
    what = snapshot(queue(), (*FOUR[:2], taken(evicted_at=LATE)))
    assert acts(plan(what), DeleteWorkload)
    other = replace(what, queue_problem=(Reason.PRIORITY_CLASS_MISSING, "WorkloadPriorityClass x does not exist"))
    for one in (what, other):
        assert warning(one)[0] == "EvictionOverdue"
        assert (
            "; no pod uses it any more, and the operator keeps trying to return it (see the operator's log)"
            in warning(one)[1]
        )


@pytest.mark.parametrize(("size", "more"), [(3, "(still running)"), (4, " and 1 more"), (6, " and 3 more")])
def test_of_many_pods_some_are_named(size: int, more: str) -> None:
    base = workload(0, size, eviction_reason="Preempted", evicted_at=LATE)
    pods = [(pod(n, workload=base.name), running()) for n in range(size)]
    fact = job(replace(trains(size), queue="gpus"), policy(size, size), queue="gpus")
    text = warning(observed(fact, pods, workloads=(base,)))[1]
    assert text.count("on node") == 3
    assert text.endswith(more)


# ---- priorities


def test_priorities_follow_the_job_where_kueue_allows_it() -> None:
    ranked = (
        workload(0, 2, has_outdated_priority=True),
        workload(1, has_outdated_priority=True, is_priority_fixed=True),
        workload(2),
    )
    what = snapshot(queue(), ranked)
    assert acts(plan(what), UpdateWorkloadPriority) == [UpdateWorkloadPriority(ranked[0].name, "uid-0")]
    assert warning(what)[0] == "PriorityPending"
    ended = (replace(ranked[0], finished=True), replace(ranked[0], number=1, is_deleting=True))
    assert acts(plan(snapshot(queue(), ended)), UpdateWorkloadPriority) == []


def test_a_priority_class_that_is_missing_is_told_while_the_job_trains() -> None:
    what = replace(
        snapshot(queue()), queue_problem=(Reason.PRIORITY_CLASS_MISSING, "WorkloadPriorityClass x does not exist")
    )
    assert warning(what)[0] == "PriorityClassMissing"
    assert "the Workloads keep their priority" in warning(what)[1]
