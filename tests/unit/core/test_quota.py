"""What Kueue grants, in the terms of the other decisions: shares, queues, starts, the record."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import (
    NOW,
    acts,
    pid,
    policy,
    ready,
    seconds,
    trains,
    transition,
)
from tests.unit.core.quota_builders import QUEUE, evicted, look, on, pending, queued, train, workload

from elastipod_operator.core.actions import (
    CreatePod,
    CreateWorkload,
    DeletePod,
    DeleteWorkload,
    ReleaseBaseQuota,
    SetQueueLabel,
    StopWorkers,
)
from elastipod_operator.core.names import Slot
from elastipod_operator.core.plan import plan
from elastipod_operator.core.quota import effective_quota_requests, quota_requests_of
from elastipod_operator.core.record import Record, RequeueBackoff, TransitionKind
from elastipod_operator.core.record_codec import decode, encode
from elastipod_operator.core.sizes import Sizes
from elastipod_operator.core.snapshot import (
    SpecLimits,
)


def test_the_base_is_the_smallest_size_and_each_increment_the_way_to_the_next() -> None:
    base, first, second = quota_requests_of(policy(2, 4))
    assert base.slots == (Slot("workers", 0), Slot("workers", 1))
    assert (first.slots, second.slots) == ((Slot("workers", 2),), (Slot("workers", 3),))


@pytest.mark.parametrize(
    ("spares", "held", "kept"),
    [
        pytest.param((1, 0), (2, 1), True, id="a spare is added to the first spec"),
        pytest.param((0, 1), (2, 1), True, id="to the second one"),
        pytest.param((0, 0), (3, 1), True, id="the spare of the first spec is taken away"),
        pytest.param((0, 0), (2, 2), True, id="that of the second one, which may train there"),
        pytest.param((1, 1), (2, 0), False, id="it does not cover the minimum"),
    ],
)
def test_a_base_of_two_specs_stays_while_it_covers_the_minimum(
    spares: tuple[int, int], held: tuple[int, int], kept: bool
) -> None:
    specs = (SpecLimits("base", 2, spares=spares[0]), SpecLimits("extra", 3, spares=spares[1]))
    wishes = policy(sizes=Sizes((3, 4, 5), 3), specs=specs)
    granted = workload(0, counts=tuple((spec.name, pods) for spec, pods in zip(specs, held, strict=True) if pods))
    first = effective_quota_requests(wishes, granted)[0]
    assert (sorted(first.counts) == sorted(granted.counts)) is kept
    assert kept or first == quota_requests_of(wishes)[0]


def test_spares_come_with_the_first_share_of_their_spec() -> None:
    wishes = policy(
        sizes=Sizes((2, 3, 5), 2), specs=(SpecLimits("base", 3, spares=1), SpecLimits("extra", 2, spares=2))
    )
    base, first, second = quota_requests_of(wishes)
    assert base.counts == (("base", 3),)
    assert (base.slots[-1], first.slots) == (Slot("base", 2), (Slot("base", 3),))
    assert second.counts == (("extra", 4),)
    assert (base.trains, second.trains) == ({"base": 2}, {"extra": 2})


def test_a_share_may_reach_over_two_specs() -> None:
    wishes = policy(sizes=Sizes((2, 4), 2), specs=(SpecLimits("base", 3), SpecLimits("extra", 1)))
    assert quota_requests_of(wishes)[1].counts == (("base", 1), ("extra", 1))


# ---- in which queue


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param({"queue": QUEUE}, [], id="the job's label"),
        pytest.param({"queue": "", "queue_in_template": "t"}, [SetQueueLabel("t")], id="the template's one becomes the job's"),
        pytest.param({"queue": "", "default_queue": True}, [SetQueueLabel("default")], id="a queue named default adopts it"),
    ],
)  # fmt: skip
def test_a_new_job_learns_its_queue(changes: dict[str, Any], named: list[SetQueueLabel]) -> None:
    todo = plan(look(None, [], **changes))
    assert todo.record.queue
    assert acts(todo, SetQueueLabel) == named
    assert [a.queue for a in acts(todo, CreateWorkload)] == [todo.record.queue]
    assert not acts(todo, CreatePod)


def test_a_job_without_a_queue_asks_nobody() -> None:
    todo = plan(look(None, [], queue="", default_queue=False))
    assert todo.record.queue == ""
    assert not acts(todo, CreateWorkload)
    assert len(acts(todo, CreatePod)) == 2


def test_a_label_that_comes_while_the_job_runs_acts_when_nothing_runs() -> None:
    todo = plan(look(trains(), [], *train(2)))
    assert (todo.record.queue, acts(todo, CreateWorkload), todo.record.transition) == ("", [], None)
    idle = replace(trains(), members=(), transition=transition(TransitionKind.SUSPEND, target_size=0))
    assert plan(look(idle, [], wishes=policy(2, 4, suspend=True))).record.queue == QUEUE


def test_a_job_that_leaves_its_queue_gives_back_what_waits() -> None:
    todo = plan(look(queued(Record(transition=transition(TransitionKind.SUSPEND))), [pending(0, 2)], queue=""))
    assert todo.record.queue == ""
    assert [a.name for a in acts(todo, DeleteWorkload)] == [pending(0).name]


def test_a_job_in_another_queue_asks_there() -> None:
    record = Record(queue="old", transition=transition(TransitionKind.SUSPEND, cause="Queued"))
    todo = plan(look(record, [pending(0, 2, queue="old")]))
    assert todo.record.queue == QUEUE
    assert [a.name for a in acts(todo, DeleteWorkload)] == [pending(0).name]
    again = plan(look(todo.record, []))
    assert acts(again, CreateWorkload) == [CreateWorkload(0, (("workers", 2),), QUEUE)]


# ---- held


def test_no_pod_before_the_base_is_admitted() -> None:
    todo = plan(look(None, []))
    assert acts(todo, CreateWorkload) == [CreateWorkload(0, (("workers", 2),), QUEUE)]
    waiting = plan(look(todo.record, [pending(0, 2)]))
    assert not acts(waiting, CreatePod)
    assert not acts(waiting, CreateWorkload)
    state = waiting.conditions[-1]
    assert (state.type, state.reason, state.message) == ("Suspended", "Queued", "waits in queue gpus: no room")
    assert waiting.record.phase_times.phase == "queued"


def test_kueue_that_is_not_there_is_told() -> None:
    todo = plan(look(None, [], queue_problem=("KueueUnavailable", "the API server has no Workloads")))
    state = todo.conditions[-1]
    assert (state.type, state.reason) == ("Suspended", "KueueUnavailable")


def test_an_admitted_base_lets_its_pods_come_and_the_increments_be_asked_for() -> None:
    held = plan(look(None, [pending(0, 2)])).record
    todo = plan(look(held, [workload(0, 2, pods_ready=None)]))
    assert (todo.record.transition and todo.record.transition.cause) == "Admitted"
    assert [(a.pod, a.workload) for a in acts(todo, CreatePod)] == [(pid(n), workload(0).name) for n in range(2)]
    assert [a.number for a in acts(todo, CreateWorkload)] == [1, 2]
    assert str(todo.size) == "0/2/4"


def test_a_quota_that_is_only_reserved_starts_nothing() -> None:
    held = plan(look(None, [pending(0, 2)])).record
    assert not acts(plan(look(held, [workload(0, 2, admitted=False)])), CreatePod)


def test_an_evicted_base_stops_the_job_and_is_released_when_its_pods_are_gone() -> None:
    todo = plan(look(queued(trains()), [evicted(0, 2)], *train(2)))
    assert todo.record.transition is not None
    assert (todo.record.transition.kind, todo.record.transition.cause) == (TransitionKind.SUSPEND, "Preempted")
    assert {a.graceful for a in acts(todo, StopWorkers)} == {True}
    assert not acts(todo, ReleaseBaseQuota)
    is_idle = [(on(0, n), ready(1, drained=True)) for n in range(2)]
    going = plan(look(todo.record, [evicted(0, 2)], *is_idle))
    assert len(acts(going, DeletePod)) == 2
    assert not acts(going, ReleaseBaseQuota)
    gone = plan(look(going.record, [evicted(0, 2)]))
    assert acts(gone, ReleaseBaseQuota) == [ReleaseBaseQuota(workload(0).name, "uid-0")]
    assert not acts(gone, CreateWorkload)
    back = plan(look(gone.record, [workload(0, 2)]))
    assert back.record.transition is not None
    assert (back.record.transition.kind, len(acts(back, CreatePod))) == (TransitionKind.START, 2)


def test_increments_go_with_their_base() -> None:
    record = queued(trains(members=(), transition=transition(TransitionKind.SUSPEND, cause="Preempted", target_size=0)))
    todo = plan(look(record, [evicted(0, 2), workload(1), pending(2)]))
    assert [a.name for a in acts(todo, DeleteWorkload)] == [workload(1).name, pending(2).name]


def test_a_base_that_somebody_took_away_stops_the_job() -> None:
    todo = plan(look(queued(trains()), [], *train(2)))
    assert todo.record.transition is not None
    assert todo.record.transition.kind is TransitionKind.SUSPEND
    assert not acts(todo, CreateWorkload), "a new base may be placed elsewhere than its pods are"
    gone = plan(look(todo.record, [], (on(0, 0, phase="Failed"), None)))
    assert [a.number for a in acts(gone, CreateWorkload)] == [0]


# ---- since when a job counts as started


def test_a_job_in_a_queue_has_started_when_it_was_admitted_first() -> None:
    at = NOW - seconds(60)
    assert "startTime" not in plan(look(queued(Record()), [pending(0, 2)])).status
    granted = look(queued(trains()), [workload(0, 2, admitted_at=at)], *train(2))
    assert plan(granted).status["startTime"] == "2026-03-01T11:59:00Z"
    told = replace(granted, job=replace(granted.job, start_time=at), workloads=(pending(0, 2),))
    assert plan(told).status["startTime"] == "2026-03-01T11:59:00Z", "what was told once stays"
    anew = replace(told, workloads=(workload(0, 2, admitted_at=NOW),))
    assert plan(anew).status["startTime"] == "2026-03-01T11:59:00Z"


# ---- the record


def test_the_record_keeps_queue_and_losses() -> None:
    for record in (queued(trains()), replace(queued(trains()), requeue_backoff=RequeueBackoff(3, NOW))):
        assert decode(encode(record)) == record


def test_the_same_look_gives_the_same_actions() -> None:
    snapshot = look(queued(trains()), [workload(0, 2), pending(1), evicted(2)], *train(2))
    assert plan(snapshot) == plan(snapshot)


@pytest.mark.parametrize(
    "changes",
    [{"is_deleting": True}, {"finished": True}, {"eviction_reason": "Preempted"}, {"admitted": False}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_workload_that_is_on_its_way_out_grants_nothing(changes: dict[str, Any]) -> None:
    assert workload(0, 4).is_granted
    assert not workload(0, 4, **changes).is_granted
