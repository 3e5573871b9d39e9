"""Jobs of thousands of pods: a decision costs twice as much for twice the pods, and the job object stays small."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from tests.counted_calls import Word, calls_in
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    acts,
    agent,
    faulted,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    silent,
    trains,
    transition,
)

from elastipod_operator.core.actions import CreatePod, DeletePod, StartWorkers, StopWorkers
from elastipod_operator.core.history import MAX_HISTORY, HistoryEntry, encode_history
from elastipod_operator.core.names import (
    ANNOTATION_APPLIED,
    ANNOTATION_HISTORY,
    ANNOTATION_SIZE,
    ANNOTATION_STATE,
    PodId,
)
from elastipod_operator.core.plan import plan
from elastipod_operator.core.quota import quota_requests_of
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import Depth, PartialGang, Record, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedWorkload, Policy, Snapshot, SpecLimits
from elastipod_operator.kube.applied import encode_applied

LIMIT_BYTES = 256 * 1024


def wishes(size: int) -> Policy:
    """Give a policy for so many pods at least and a quarter more at most."""
    base = policy(size, size + size // 4, scaling_timeout=timedelta(0))
    return replace(base, sizes=replace(base.sizes, start=size))


def begins(size: int) -> Snapshot:
    """All agents of a new job are ready."""
    record = Record(transition=transition(TransitionKind.START, target_size=size, from_size=0))
    return observed(job(record, wishes(size)), [(pod(n), ready()) for n in range(size)])


def comes_up(size: int) -> Snapshot:
    """Half of the agents were started, the others are not yet."""
    pods = [(pod(n), running() if n % 2 else ready()) for n in range(size)]
    return observed(job(trains(size, running_since=None), wishes(size)), pods)


def trains_on(size: int) -> Snapshot:
    """All train; nothing is to be done. What lacks to the maximum is loading."""
    pods = [(pod(n), running()) for n in range(size)] + [
        (pod(n), ready(warming=True, answering_since=NOW)) for n in range(size, size + size // 4)
    ]
    return observed(job(trains(size), wishes(size)), pods)


def breaks(size: int) -> Snapshot:
    """One worker failed."""
    return observed(job(trains(size), wishes(size)), [(pod(n), running() if n else faulted()) for n in range(size)])


def counted_id(ordinal: int) -> PodId:
    """Give a pod's identity that is not the same object as any other, as in a record that was read."""
    return pid(ordinal, spec=Word("workers"))


def counted_ids(numbers: Iterable[int]) -> tuple[PodId, ...]:
    return tuple(counted_id(n) for n in numbers)


def counted_wishes(low: int, high: int, **changes: Any) -> Policy:
    return policy(low, high, scaling_timeout=timedelta(0), specs=(SpecLimits(Word("workers"), high),), **changes)


def seen(numbers: Iterable[int], one: ObservedAgent | None, **changes: Any) -> list[Seen]:
    """Give pods, all with the same agent."""
    return [(pod(counted_id(n), **changes), one) for n in numbers]


def in_change(size: int, kind: TransitionKind, **fields: Any) -> Record:
    """Give the record of a job that trained with so many and changes now."""
    return trains(size, members=counted_ids(range(size)), transition=transition(kind, from_size=size, **fields))


def stopping(**fields: Any) -> ObservedAgent:
    return agent(AgentState.STOPPING, 1, **fields)


def trains_counted(size: int) -> Snapshot:
    """All train."""
    return observed(
        job(trains(size, members=counted_ids(range(size))), counted_wishes(size, size + size // 4)),
        seen(range(size), running()),
    )


def rests(size: int) -> Snapshot:
    """The nodes of an increment were released while the others train."""
    gang = PartialGang(NOW - seconds(30), 0, 1, NOW + seconds(100))
    record = trains(size, members=counted_ids(range(size)), gang=gang)
    return observed(job(record, counted_wishes(size, size + size // 4)), seen(range(size), running()))


def rests_before_the_start(size: int) -> Snapshot:
    """The nodes of the minimum were released; one pending pod shows the demand."""
    gang = PartialGang(NOW - seconds(30), 0, 1, NOW + seconds(100))
    start = transition(TransitionKind.START, from_size=0, target_size=size)
    pods = seen(range(1), None, node="", phase="Pending", started=False)
    return observed(job(Record(transition=start, gang=gang), counted_wishes(size, size + size // 4)), pods)


def shrinks(size: int) -> Snapshot:
    """Half of the members drain to leave."""
    record = in_change(size, TransitionKind.RESIZE, target_size=size // 2, leavers=counted_ids(range(size // 2, size)))
    return observed(job(record, counted_wishes(2, size // 2)), seen(range(size), stopping()))


def has_drained(size: int) -> Snapshot:
    """All have stopped; half of the members leave."""
    record = in_change(size, TransitionKind.RESIZE, target_size=size // 2, leavers=counted_ids(range(size // 2, size)))
    return observed(job(record, counted_wishes(2, size // 2)), seen(range(size), ready(1, drained=True)))


def saves_a_checkpoint(size: int) -> Snapshot:
    """All drain and are told that they leave, so that they save a checkpoint."""
    record = in_change(
        size, TransitionKind.RESIZE, target_size=size, leavers=counted_ids(range(size)), depth=Depth.MEMORY
    )
    return observed(
        job(record, counted_wishes(size, size + size // 4)), seen(range(size), stopping(memory_state="replicated"))
    )


def hands_over(size: int) -> Snapshot:
    """All have stopped with shards; half of the members leave."""
    record = in_change(
        size,
        TransitionKind.RESIZE,
        target_size=size // 2,
        leavers=counted_ids(range(size // 2, size)),
        depth=Depth.MEMORY,
    )
    kept = ready(1, drained=True, memory_state="sharded", num_kept=1)
    return observed(job(record, counted_wishes(2, size // 2)), seen(range(size), kept))


def is_given_up(size: int) -> Snapshot:
    """None of the members has stopped in time."""
    record = in_change(size, TransitionKind.RECOVERY, target_size=size, began_s=120)
    return observed(
        job(record, counted_wishes(size, size + size // 4)), seen(range(size), stopping(answering_since=LONG_AGO))
    )


def replaces_many(size: int) -> Snapshot:
    """Half of the members are lost."""
    record = in_change(size, TransitionKind.RECOVERY, target_size=size, is_budget_checked=True)
    record = replace(record, lost=counted_ids(range(size // 2)))
    pods = [*seen(range(size // 2), silent()), *seen(range(size // 2, size), ready(1))]
    return observed(job(record, counted_wishes(2, size)), pods)


def recovers_with_shards(size: int) -> Snapshot:
    """A recovery waits for a size with room for all who hold shards."""
    record = replace(
        in_change(size, TransitionKind.RECOVERY, target_size=size, depth=Depth.MEMORY, is_budget_checked=True),
        window_since=NOW,
    )
    kept = ready(1, memory_state="sharded", num_kept=1)
    return observed(job(record, counted_wishes(size, size + size // 4)), seen(range(size - 1), kept))


def is_suspended(size: int) -> Snapshot:
    """The user has suspended it."""
    record = trains(size, members=counted_ids(range(size)))
    return observed(job(record, counted_wishes(size, size, suspend=True)), seen(range(size), running()))


def has_ended(size: int) -> Snapshot:
    """It has completed, and its pods end."""
    record = trains(size, members=counted_ids(range(size)), outcome="Completed", ended_at=NOW, running_since=None)
    return observed(job(record, counted_wishes(size, size + size // 4)), seen(range(size), running()))


def in_queue(size: int, **changes_of_job: Any) -> Snapshot:
    """A job in a queue whose increments have one replica each: one Workload for each replica."""
    wish = counted_wishes(1, size, suspend=changes_of_job.pop("suspend", False))
    record = replace(trains(size, members=counted_ids(range(size)), queue="q"), **changes_of_job.pop("record", {}))
    workloads = tuple(
        ObservedWorkload(
            name=Word(f"w{one.number}"), uid=f"u{one.number}", number=one.number, counts=one.counts, created_at=LONG_AGO,
            queue="q", reserved=True, admitted=True, admitted_at=LONG_AGO, pods_ready=True,
        )
        for one in quota_requests_of(wish)
    )  # fmt: skip
    pods = [(pod(counted_id(n), workload=Word(f"w{n}")), running()) for n in range(size)]
    return observed(job(record, wish, queue="q", **changes_of_job), pods, workloads=workloads)


def trains_in_queue(size: int) -> Snapshot:
    return in_queue(size)


def is_suspended_in_queue(size: int) -> Snapshot:
    return in_queue(size, suspend=True)


def has_ended_in_queue(size: int) -> Snapshot:
    return in_queue(size, record={"outcome": "Completed", "ended_at": NOW, "running_since": None})


def is_deleted_in_queue(size: int) -> Snapshot:
    return in_queue(size, deleting_since=NOW)


def rests_in_queue(size: int) -> Snapshot:
    return in_queue(size, record={"gang": PartialGang(NOW - seconds(30), 0, 1, NOW + seconds(100))})


def eviction_is_overdue(size: int) -> Snapshot:
    """Kueue has waited for the quota of all increments for long."""
    snapshot = in_queue(size)
    evicted: dict[str, Any] = {
        "eviction_reason": "Preempted",
        "eviction_message": "a more important job came",
        "evicted_at": LONG_AGO,
    }
    workloads = tuple(replace(one, **evicted) if one.number else one for one in snapshot.workloads)
    return replace(snapshot, workloads=workloads)


def waits_for_replacements(size: int) -> Snapshot:
    """All pods have ended, and their replacements wait for a back-off."""
    record = in_change(size, TransitionKind.RECOVERY, target_size=size, is_budget_checked=True)
    record = replace(record, consecutive_failures=9)
    return observed(job(record, counted_wishes(size, size)), seen(range(size), None, phase="Failed", created_at=NOW))


def shrank_in_queue(size: int) -> Snapshot:
    """It shrank after a fault; replacements may still wait for nodes."""
    return in_queue(size, record={"members": counted_ids(range(size // 2)), "shrank_after_fault": True})


COUNTED = (
    trains_counted, rests, rests_before_the_start, shrinks, has_drained, saves_a_checkpoint, hands_over, is_given_up, replaces_many,
    recovers_with_shards, is_suspended, has_ended, trains_in_queue, is_suspended_in_queue, has_ended_in_queue, is_deleted_in_queue,
    rests_in_queue, shrank_in_queue, eviction_is_overdue, waits_for_replacements,
)  # fmt: skip


@pytest.mark.parametrize("situation", [begins, comes_up, trains_on, breaks, *COUNTED])
def test_twice_the_pods_cost_twice_the_work(situation: Callable[[int], Snapshot]) -> None:
    small, large = situation(200), situation(400)
    assert calls_in(lambda: plan(large)) < 2.2 * calls_in(lambda: plan(small))


def test_the_situations_are_what_they_are_called() -> None:
    assert len(acts(plan(begins(200)), StartWorkers)) == 200
    assert len(acts(plan(comes_up(200)), StartWorkers)) == 100
    assert not plan(trains_on(200)).actions
    assert "50 more replicas import" in str(plan(trains_on(200)).conditions)
    assert len(acts(plan(breaks(200)), StopWorkers)) == 200
    assert len(plan(is_given_up(200)).record.lost) == 200
    assert len(acts(plan(has_drained(200)), StartWorkers)) == len(acts(plan(hands_over(200)), StartWorkers)) == 100
    assert len(acts(plan(shrinks(200)), StopWorkers)) == 0, "all drain already"
    saving = saves_a_checkpoint(200).job.record
    assert saving is not None
    assert saving.all_leave
    assert len(acts(plan(replaces_many(200)), DeletePod)) == len(acts(plan(replaces_many(200)), CreatePod)) == 100
    assert len(acts(plan(has_ended_in_queue(200)), DeletePod)) == 200
    assert len(in_queue(200).workloads) == 200


def test_a_job_of_4000_pods_at_the_end_of_its_days_is_a_small_object() -> None:
    """Every third pod made anew up to nine times, hundreds given up, a full history, templates of 20 KiB that were taken up."""
    members = tuple(pid(n, n * 7 % 10 if n % 3 == 0 else 0) for n in range(4000))
    lost = tuple(pid(n, n % 5) for n in range(0, 4000, 9))
    record = trains(
        4000,
        900,
        members=members,
        lost=lost,
        transition=transition(TransitionKind.RECOVERY, target_size=4000, message="x" * 1000),
    )
    assert decode(encode(record)).members == members
    entry = HistoryEntry(
        generation=900, from_size=4000, to_size=3999, kind=TransitionKind.RECOVERY, cause=OpenReason("ReplacementTimeout"), at=NOW,
        detected_at=NOW, running_at=NOW,
    )  # fmt: skip
    script = "\n".join(f"export SETTING_{n}={n * 7919 % 1000003:x}" for n in range(800))
    template = {"spec": {"containers": [{"name": "trainer", "image": "train:1", "command": ["sh", "-c", script]}]}}
    spec = {"nprocPerNode": "8", "replicaSpecs": [{"name": "workers", "replicas": 4000, "template": template}]}
    annotations = {
        ANNOTATION_STATE: encode(record),
        ANNOTATION_SIZE: "4000/4000/4000",
        ANNOTATION_HISTORY: encode_history((entry,) * (MAX_HISTORY + 10)),
        ANNOTATION_APPLIED: encode_applied(spec),
    }
    told = plan(observed(job(record, wishes(4000)), [(pod(member), running(900)) for member in members]))
    conditions = [
        {"type": c.type, "status": str(c.status), "reason": c.reason, "message": c.message} for c in told.conditions
    ]
    body = {"metadata": {"annotations": annotations}, "spec": spec, "status": {**told.status, "conditions": conditions}}
    assert len(json.dumps(template)) > 20_000
    assert len(json.dumps(body, default=str).encode()) < LIMIT_BYTES / 2  # as much again is left for managedFields
