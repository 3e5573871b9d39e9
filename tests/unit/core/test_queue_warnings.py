"""What a job is told of its queue: one sentence and one Event each, gone once it is mended (spec 40 item 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import NOW, acts, job, observed, pid, pod, policy, running, seconds, silent, trains

from elastipod_operator.core.actions import DeleteWorkload, UpdateWorkloadPriority
from elastipod_operator.core.names import workload_name
from elastipod_operator.core.plan import plan
from elastipod_operator.core.queue_capacity import largest_size, most_replicas
from elastipod_operator.core.queue_facts import ClusterQueueFact, FlavorCapacity, PodRequests, QueueFact
from elastipod_operator.core.queue_warnings import eviction_due_at
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import ObservedNode, ObservedWorkload, Snapshot, SpecLimits

GPU = "nvidia.com/gpu"
NEEDS = (PodRequests("workers", ((GPU, 1000), ("cpu", 500))),)


def room(gpus: int, name: str = "gpus", cpu: int = 1000, labels: dict[str, str] | None = None) -> FlavorCapacity:
    """Give a flavor with room for so many GPUs and CPUs."""
    return FlavorCapacity(name, ((GPU, gpus * 1000), ("cpu", cpu * 1000)), tuple((labels or {}).items()))


def cluster_queue(**changes: Any) -> ClusterQueueFact:
    return replace(ClusterQueueFact(name="team", groups=((room(4),),)), **changes)


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
    fact = job(replace(trains(size), queue="gpus"), policy(2, 4, payback=False), queue="gpus", needs=NEEDS, **changes)
    return observed(fact, pods, workloads=tuple(workloads), queue_fact=about)


def warning(what: Snapshot) -> tuple[str, str]:
    """Give reason and message of condition Warning; empty without one."""
    found = next((c for c in plan(what).conditions if c.type == "Warning"), None)
    return (found.reason, found.message) if found is not None else ("", "")


def events(what: Snapshot) -> list[str]:
    return [note.reason for note in plan(what).events if note.warning]


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
            "LocalQueue gpus admits nothing more, and what runs goes on (stopPolicy Hold): Stopped: by the admin",
            id="LocalQueue on hold",
        ),
        pytest.param(
            queue(cluster_queue=cluster_queue(stop="HoldAndDrain", inactive="Stopped: drained")),
            "QueueStopped",
            "ClusterQueue team admits nothing more, and what runs is evicted (stopPolicy HoldAndDrain): Stopped: drained",
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
        pytest.param(
            queue(cluster_queue=cluster_queue(groups=((room(3),),))),
            "QueueTooSmall",
            "the largest size of 4 replicas can never be reached: the quota of nvidia.com/gpu in ClusterQueue team is enough for 3;",
            id="too small for the largest size",
        ),
        pytest.param(
            queue(cluster_queue=cluster_queue(cohort="all", groups=((room(9, cpu=1),),))),
            "QueueTooSmall",
            "the quota of cpu in ClusterQueue team with all that cohort all may lend is enough for 2;",
            id="with what is lent",
        ),
        pytest.param(
            queue(cluster_queue=cluster_queue(groups=((room(1),),))),
            "QueueTooSmall",
            "the smallest size of 2 replicas can never be admitted: the quota of nvidia.com/gpu in ClusterQueue team is enough for 1;",
            id="too small for the smallest",
        ),
        pytest.param(
            queue(cluster_queue=cluster_queue(groups=((room(0),),))),
            "QueueTooSmall",
            "is enough for none;",
            id="no quota at all",
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
    about = queue(cluster_queue=cluster_queue(stop="Hold", can_preempt_within=False, groups=((room(3),),)))
    assert warning(snapshot(about))[0] == "QueueStopped"
    assert events(snapshot(about)) == ["QueueStopped", "QueueTooSmall", "PreemptionNever"]
    one = plan(snapshot(queue(cluster_queue=cluster_queue(can_preempt_within=False)))).conditions
    assert events(snapshot(about, conditions=one)) == ["QueueStopped", "QueueTooSmall"], "of what is new"


def test_strict_order_matters_while_increments_wait() -> None:
    about = queue(cluster_queue=cluster_queue(is_strict=True))
    assert warning(snapshot(about)) == ("", "")
    assert warning(snapshot(about, (workload(0, 2), waiting(1), waiting(2))))[0] == "StrictFIFO"
    assert warning(snapshot(about, (workload(0, 2), waiting(1, "")))) == ("", ""), "Kueue has not looked at it yet"


def test_a_job_of_one_size_gives_nothing_up_anyway() -> None:
    what = snapshot(queue(cluster_queue=cluster_queue(can_preempt_within=False)), (workload(0, 4),))
    assert warning(replace(what, job=replace(what.job, policy=policy(4, 4)))) == ("", "")


def test_a_job_in_no_queue_is_not_told_of_any() -> None:
    what = snapshot(queue(exists=False), ())
    assert warning(replace(what, job=replace(what.job, queue="", record=trains(1)))) == ("", "")


# ---- how much fits


def sizes(
    groups: Any, needs: tuple[PodRequests, ...] = NEEDS, allowed: tuple[int, ...] = (2, 3, 4), spares: int = 0
) -> int:
    specs = tuple(SpecLimits(need.spec, 4, spares) for need in needs)
    return largest_size(groups, needs, allowed, specs)[0]


def test_spares_take_quota_too() -> None:
    assert (sizes(((room(4),),)), sizes(((room(4),),), spares=1), sizes(((room(5),),), spares=1)) == (4, 3, 4)


def test_increments_stay_where_the_base_is() -> None:
    reserved, spot = room(3, "reserved", labels={"kind": "reserved"}), room(2, "spot", labels={"kind": "spot"})
    assert sizes(((reserved, spot),)) == 3
    assert sizes(((room(3, "plain"), room(2, "other")),)) == 4, "flavors without labels are all the same to pods"


def test_a_gang_is_on_one_flavor() -> None:
    assert sizes(((room(1, "a"), room(1, "b")),)) == 0
    assert sizes(((room(2, "a"), room(1, "b")),)) == 3


def test_pods_that_choose_their_nodes_have_the_quota_of_those() -> None:
    choosy = (replace(NEEDS[0], selector=(("kind", "spot"), ("zone", "b"))),)
    flavors = (room(9, "reserved", labels={"kind": "reserved"}), room(2, "spot", labels={"kind": "spot"}))
    assert sizes((flavors,), choosy) == 2, "a label that no flavor has is no business of Kueue's"
    assert sizes((flavors[:1],), choosy) == 4, "no such nodes is another matter than quota"


def test_every_group_of_resources_must_do() -> None:
    gpus, others = FlavorCapacity("gpus", ((GPU, 4000),)), FlavorCapacity("cpus", (("cpu", 1500), ("pods", 9000)))
    assert sizes(((gpus,), (others,))) == 3
    assert sizes(((gpus,), (FlavorCapacity("few", (("pods", 2000),)),))) == 2, (
        "Kueue counts pods where a queue names them"
    )
    assert sizes(((FlavorCapacity("efa", (("efa", 0),)),),)) == 4, "what the pods do not ask for"
    assert sizes(()) == 4, "nothing is known"


def test_two_specs_may_be_in_different_places() -> None:
    needs = (PodRequests("base", ((GPU, 1000),)), PodRequests("extra", ((GPU, 1000),)))
    flavors = (room(2, "a", labels={"kind": "a"}), room(1, "b", labels={"kind": "b"}))
    specs = (SpecLimits("base", 2), SpecLimits("extra", 2))
    assert largest_size((flavors,), needs, (2, 3, 4), specs) == (3, GPU)


@pytest.mark.parametrize("quota", range(6))
def test_how_much_of_a_base_would_fit(quota: int) -> None:
    groups = ((room(quota),),)
    assert most_replicas(groups, NEEDS, 6, (SpecLimits("workers", 6),)) == quota


def test_thousands_of_sizes_are_judged_once() -> None:
    allowed, specs, groups = tuple(range(1, 4001)), (SpecLimits("workers", 4000),), ((room(3999, cpu=9999),),)
    largest_size.clear()
    assert [largest_size(groups, NEEDS, allowed, specs) for _ in range(3)] == [(3999, GPU)] * 3
    assert largest_size.misses == 1


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
    text = f"Kueue waits for the quota of Workload {name} since 11:49:01 UTC (Preempted)"
    assert warning(late) == (
        "EvictionOverdue",
        f"{text}; it is held up by pod job-workers-3 on node node-3 (still at work)",
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
            "(which is not ready)",
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
    other = replace(what, queue_trouble=("PriorityClassMissing", "WorkloadPriorityClass x does not exist"))
    for one in (what, other):
        assert warning(one)[0] == "EvictionOverdue"
        assert (
            "; no pod is left on it, giving it back is tried again and again (see the operator's log)"
            in warning(one)[1]
        )


def test_of_many_pods_some_are_named() -> None:
    base = workload(0, 6, eviction_reason="Preempted", evicted_at=LATE)
    pods = [(pod(n, workload=base.name), running()) for n in range(6)]
    fact = job(replace(trains(6), queue="gpus"), policy(6, 6), queue="gpus")
    text = warning(observed(fact, pods, workloads=(base,)))[1]
    assert text.count("on node") == 3
    assert text.endswith(" and 3 more")


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
    what = replace(snapshot(queue()), queue_trouble=("PriorityClassMissing", "WorkloadPriorityClass x does not exist"))
    assert warning(what)[0] == "PriorityClassMissing"
    assert "the Workloads keep their priority" in warning(what)[1]


def test_sizes_are_those_that_the_user_wishes() -> None:
    """Not those that are granted: of these there would always be enough."""
    what = snapshot(queue(cluster_queue=cluster_queue(groups=((room(3),),))), FOUR[:2])
    wishes = policy(2, 4, payback=False, sizes=Sizes((2, 4), 2))
    assert "of 4 replicas" in warning(what)[1]
    assert "enough for 2" in warning(replace(what, job=replace(what.job, policy=wishes)))[1]
