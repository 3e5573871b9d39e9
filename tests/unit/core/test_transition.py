"""From one generation to the next: stopping is told once, who is gathered, and what the start notes."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    faulted,
    job,
    observed,
    pid,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
    transition,
)
from tests.unit.core.transition_builders import DRAINED, GROWTH, step_of, stopped

from elastipod_operator.core.actions import DeletePod, JobEvent, ShutDownAgent
from elastipod_operator.core.context import PlanDraft
from elastipod_operator.core.names import Slot
from elastipod_operator.core.plan import plan
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import Depth, PartialGang, Record, TransitionKind
from elastipod_operator.core.sizes import Sizes


@pytest.mark.parametrize(
    ("kind", "target_size", "began_s", "told"),
    [
        pytest.param(
            TransitionKind.RESIZE, 3, 0, [JobEvent(Reason.DRAINING, "2 -> 3: a test")], id="a resize, with both sizes"
        ),
        pytest.param(
            TransitionKind.SUSPEND, 0, 0, [JobEvent(Reason.DRAINING, "all workers stop: a test")], id="a suspension"
        ),
        pytest.param(TransitionKind.RECOVERY, 2, 0, [], id="not a recovery, whose fault was told"),
        pytest.param(TransitionKind.RESIZE, 3, 1, [], id="and nothing twice"),
    ],
)
def test_the_beginning_of_a_transition_is_told(
    kind: TransitionKind, target_size: int, began_s: float, told: list[JobEvent]
) -> None:
    record = trains(transition=transition(kind, began_s=began_s, target_size=target_size))
    step = step_of(observed(job(record, policy(2, 4, suspend=kind is TransitionKind.SUSPEND)), stopped(2, running())))
    assert list(step.events) == told
    assert step.wake_at is not None
    assert len(step.actions) == 2


def test_a_fault_is_told_first_and_as_a_warning() -> None:
    todo = plan(observed(job(trains(gang=PartialGang(NOW, 1))), [(pod(0), faulted()), (pod(1), running())]))
    assert todo.record.transition is not None
    assert todo.events[0] == JobEvent(OpenReason("WorkerCrash"), todo.record.transition.message)
    assert todo.record.gang is None


def test_the_backoff_of_a_recovery_differs_from_job_to_job() -> None:
    record = trains(best_step=9, consecutive_failures=3)
    waits = set()
    for uid in ("one", "other"):
        pods = [(pod(0), faulted(step=9)), (pod(1), running(step=9))]
        began = plan(observed(replace(job(record), uid=uid), pods)).record.transition
        assert began is not None
        waits.add(began.not_before)
    assert len(waits) == 2


def test_a_recovery_that_begins_with_everybody_stopped_goes_on_at_once() -> None:
    wishes = policy(2, 2)
    is_idle = [(pod(0), ready(1)), (pod(1), ready(1))]
    todo = plan(observed(job(trains(), wishes), is_idle))
    assert [n.reason for n in todo.events] == ["WorkersStopped", "Recovered"]
    assert (todo.record.generation, todo.record.restarts) == (2, 1)


# ---- suspension


def test_a_suspended_job_keeps_the_names_of_its_pods_in_mind() -> None:
    members = (pid(0, 3), pid(1))
    record = trains(members=members, transition=transition(TransitionKind.SUSPEND, target_size=0))
    pods = [(pod(pid(0, 3)), DRAINED), (pod(1), DRAINED), (pod(pid(2, 1)), ready())]
    step = step_of(observed(job(record, policy(suspend=True)), pods))
    assert step.record.members == ()
    assert step.record.incarnations == {Slot("workers", 0): 3, Slot("workers", 1): 0, Slot("workers", 2): 1}
    assert [a for a in step.actions if isinstance(a, DeletePod)] == [
        DeletePod(p.name, p.uid, "the job is suspended") for p, _ in pods
    ]
    assert (step.wake_at, step.adopts_spec) == (None, False)


SUSPENDED = trains(
    members=(), window_since=LONG_AGO, fault_at=LONG_AGO, suspended_time=seconds(7),
    transition=transition(TransitionKind.SUSPEND, began_s=600, from_size=3, not_before=NOW, deadline=LONG_AGO),
)  # fmt: skip


def test_a_resumed_job_begins_like_a_new_one() -> None:
    step = step_of(observed(job(SUSPENDED)))
    began = step.record.transition
    assert began is not None
    assert (began.kind, began.cause, began.message) == (TransitionKind.START, "Resumed", "the user resumed the job")
    assert (began.from_size, began.target_size, began.graceful) == (0, 3, False)
    assert (began.began_at, began.detected_at, began.deadline) == (NOW, NOW, NOW + seconds(30))
    after = step.record
    assert (after.members, after.window_since, after.fault_at, after.suspended_time) == (
        (),
        None,
        None,
        seconds(607),
    )
    assert (step.wake_at, step.adopts_spec, step.actions) == (NOW, True, ())
    assert step.events == (JobEvent(Reason.RESUMED, "the user resumed the job"),)


@pytest.mark.parametrize(
    ("from_size", "sizes", "target_size"),
    [
        pytest.param(5, Sizes((2, 4), 2), 4, id="the size that it had, as far as it is allowed now"),
        pytest.param(0, Sizes((2, 4), 4), 4, id="the first one when it had none"),
        pytest.param(1, Sizes((2, 3, 4), 3), 3, id="or when that is too small now"),
    ],
)
def test_the_size_that_a_resumed_job_wants(from_size: int, sizes: Sizes, target_size: int) -> None:
    record = replace(SUSPENDED, transition=transition(TransitionKind.SUSPEND, from_size=from_size))
    began = step_of(observed(job(record, policy(sizes=sizes)))).record.transition
    assert began is not None
    assert began.target_size == target_size


def test_pods_of_an_edited_template_that_are_still_there_at_the_resumption_are_made_anew() -> None:
    record = replace(SUSPENDED, lost=(pid(1),))
    pods = [(pod(pid(0, 2)), ready(1)), (pod(1), ready(1)), (pod(2, started=False, ip=""), None)]
    kept = step_of(observed(job(record), pods))
    assert (kept.actions, kept.record.lost) == ((), (pid(1),))
    step = step_of(observed(job(record, pending_edits=("template",)), pods))
    assert step.record.lost == (pid(1), pid(0, 2), pid(2))
    assert step.record.incarnations == {Slot("workers", 0): 2, Slot("workers", 1): 0, Slot("workers", 2): 0}
    assert [a for a in step.actions if isinstance(a, DeletePod)] == [
        DeletePod(p.name, p.uid, "made from a template that was edited") for p, _ in (pods[0], pods[2])
    ]
    assert [a.pod for a in step.actions if isinstance(a, ShutDownAgent)] == ["job-workers-0-2"]
    assert step.adopts_spec


def test_a_job_that_is_suspended_while_it_gathers_keeps_that_on_record() -> None:
    record = trains(transition=transition(TransitionKind.RECOVERY, is_budget_checked=True), window_since=LONG_AGO)
    step = step_of(observed(job(record, policy(suspend=True)), stopped(2, ready(1))))
    began = step.record.transition
    assert began is not None
    assert (began.kind, began.cause, began.message, began.from_size, began.target_size) == (
        TransitionKind.SUSPEND,
        "Suspended",
        "the user suspended the job",
        2,
        0,
    )
    assert (began.began_at, step.record.window_since, step.record.members) == (NOW, None, ())


# ---- gathering


@pytest.mark.parametrize(
    ("changes", "began_s", "number", "size"),
    [
        pytest.param({"graceful": False}, 5, 2, 2, id="a drain for a node takes who is there"),
        pytest.param({"graceful": False}, 5, 1, 0, id="but not fewer than the minimum"),
        pytest.param({"graceful": False}, 5, 4, 4, id="and all that is ready"),
        pytest.param(
            {"kind": TransitionKind.RECOVERY, "is_budget_checked": True},
            29,
            2,
            0,
            id="a recovery waits for faultyScaleDownTimeout",
        ),
        pytest.param({"kind": TransitionKind.RECOVERY, "is_budget_checked": True}, 30, 2, 2, id="and no longer"),
        pytest.param(
            {"kind": TransitionKind.RECOVERY, "is_budget_checked": True, "not_before": NOW + seconds(1)},
            31,
            3,
            0,
            id="its back-off",
        ),
        pytest.param(
            {"kind": TransitionKind.RECOVERY, "is_budget_checked": True, "not_before": NOW}, 31, 3, 3, id="is then over"
        ),
    ],
)
def test_who_is_gathered(changes: dict[str, Any], began_s: float, number: int, size: int) -> None:
    record = trains(3, transition=transition(began_s=began_s, target_size=3, **changes))
    step = step_of(observed(job(record), stopped(number, ready(1))))
    assert len(step.record.members) == (size or 3)
    assert len(step.actions) == size
    assert (step.record.transition is None) is bool(size)


@pytest.mark.parametrize(
    ("state", "depth", "new_processes", "waits"),
    [
        pytest.param("replicated", Depth.MEMORY, False, False, id="each of them has the whole state"),
        pytest.param("sharded", Depth.MEMORY, False, True, id="each has a part: another size moves all of it"),
        pytest.param("replicated", Depth.PROCESS, False, True, id="all processes are new"),
        pytest.param("replicated", Depth.MEMORY, True, True, id="the user wants new processes for each change"),
        pytest.param("", Depth.MEMORY, False, True, id="agents keep workers of which they know nothing"),
    ],
)
def test_those_who_are_left_go_on_at_once(state: str, depth: Depth, new_processes: bool, waits: bool) -> None:
    began = transition(
        TransitionKind.RECOVERY, began_s=1, from_size=3, target_size=3, is_budget_checked=True, depth=depth
    )
    pods = stopped(2, ready(1, memory_state=state, num_kept=1 if depth is Depth.MEMORY else None))
    wishes = policy(2, 4, new_processes=new_processes)
    step = step_of(observed(job(trains(3, transition=began), wishes), pods))
    assert len(step.record.members) == (3 if waits else 2)
    assert step.record.shrank_after_fault is not waits
    assert step.wake_at == (NOW + seconds(29) if waits else None)


def test_too_few_wait_for_replacements_whatever_they_hold() -> None:
    began = transition(TransitionKind.RECOVERY, began_s=1, target_size=3, is_budget_checked=True, depth=Depth.MEMORY)
    pods = stopped(1, ready(1, memory_state="replicated", num_kept=1))
    step = step_of(observed(job(trains(3, transition=began)), pods))
    assert (step.record.transition, step.actions) == (began, ())


def test_a_full_restart_waits_for_its_pods_as_a_start_does() -> None:
    began = transition(TransitionKind.RECOVERY, began_s=500, target_size=3, recreates_pods=True, is_budget_checked=True)
    record = trains(members=(), transition=began, window_since=NOW - seconds(59))
    early = step_of(observed(job(record), stopped(2, ready(0))))
    assert (early.wake_at, early.actions) == (NOW + seconds(1), ())
    late = step_of(observed(job(replace(record, window_since=NOW - seconds(60))), stopped(2, ready(0))))
    assert len(late.record.members) == 2


@pytest.mark.parametrize(
    ("began", "number", "window", "wait_s"),
    [
        pytest.param(transition(TransitionKind.START, target_size=3), 2, NOW, 60, id="the window of a start"),
        pytest.param(
            transition(TransitionKind.RECOVERY, target_size=3, is_budget_checked=True),
            2,
            NOW,
            25,
            id="the patience of a recovery",
        ),
        pytest.param(
            transition(TransitionKind.RECOVERY, target_size=3, is_budget_checked=True, not_before=NOW + seconds(7)),
            3,
            LONG_AGO,
            7,
            id="its back-off",
        ),
        pytest.param(
            transition(TransitionKind.START, target_size=3), 1, None, None, id="too few: nothing but the watch tells"
        ),
    ],
)
def test_gathering_is_looked_at_again(began: Any, number: int, window: datetime | None, wait_s: float | None) -> None:
    record = Record(transition=began, window_since=None if window == NOW else LONG_AGO)
    step = step_of(observed(job(record), stopped(number, ready(0))))
    assert step.record.window_since == window
    assert step.wake_at == (None if wait_s is None else NOW + seconds(wait_s))
    assert step.actions == ()


def test_a_first_start_takes_the_wanted_size_and_every_later_one_all_that_is_ready() -> None:
    began = transition(TransitionKind.START, target_size=3)
    first = step_of(observed(job(Record(transition=began)), stopped(4, ready(0))))
    later = step_of(observed(job(Record(transition=began, generation=1)), stopped(4, ready(1))))
    assert (len(first.record.members), len(later.record.members)) == (3, 4)


def test_a_goal_below_the_smallest_size_is_the_smallest_size() -> None:
    record = Record(transition=transition(TransitionKind.START, target_size=1))
    assert len(step_of(observed(job(record), stopped(4, ready(0)))).record.members) == 2


def test_a_gang_that_lacks_some_is_watched_with_the_patience_of_this_job() -> None:
    def after(uid: str, **changes: Any) -> PlanDraft:
        pods = [(pod(0), ready(0)), (pod(1, phase="Pending", node="", ip="", started=False), None)]
        record = Record(transition=transition(TransitionKind.START), gang=PartialGang(NOW, 1), window_since=LONG_AGO)
        return step_of(observed(replace(job(record), uid=uid), pods, **changes))

    one, other = after("one"), after("other")
    assert one.wake_at != other.wake_at
    assert (one.record.gang, one.record.window_since) == (PartialGang(NOW, 1), None)
    alone = [(pod(0), ready(0))]
    record = Record(transition=transition(TransitionKind.START))
    assert step_of(observed(job(record), alone)).record.gang is None
    assert step_of(observed(job(record), alone, pod_creation_error="no room")).record.gang == PartialGang(NOW, 1)


def test_that_a_gang_gives_its_places_back_is_told() -> None:
    pods = [(pod(0), ready(0)), (pod(1, phase="Pending", node="", ip="", started=False), None)]
    record = Record(transition=transition(TransitionKind.START), gang=PartialGang(NOW - seconds(181), 1))
    assert [n.reason for n in step_of(observed(job(record), pods)).events] == ["PlacesGivenBack"]


def test_only_a_growth_leaves_newcomers_behind_that_still_load() -> None:
    cold = ready(warming=True, answering_since=NOW)
    pods = [*stopped(2), (pod(2), cold)]
    sizes = {
        cause: len(
            step_of(observed(job(trains(transition=transition(cause=cause, target_size=3))), pods)).record.members
        )
        for cause in (GROWTH, "PodDisrupted")
    }
    assert sizes == {GROWTH: 2, "PodDisrupted": 3}
