"""The phase_times: every second of a job is booked to one phase."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    agent,
    faulted,
    job,
    observed,
    pod,
    policy,
    ready,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.phase_accounting import Phase, goodput, phase_times_since, total
from elastipod_operator.core.plan import plan
from elastipod_operator.core.record import Depth, PhaseTimes, Record, TransitionKind
from elastipod_operator.core.snapshot import AgentState, ObservedAgent, ObservedPod, Snapshot

WAITS = (pod(1, phase="Pending", node="", ip="", started=False), None)
STARTS = Record(transition=transition(TransitionKind.START))
BOTH = [(pod(0), running()), (pod(1), running())]
STEPS = [(pod(n), running(step=50, step_at=NOW, step_pace=seconds(2))) for n in range(2)]


@pytest.mark.parametrize(
    ("record", "pods", "phase"),
    [
        pytest.param(STARTS, [(pod(0), ready(0)), WAITS], Phase.SCHEDULING, id="too few have a place"),
        pytest.param(STARTS, [(pod(0), ready(0)), (pod(1), None)], Phase.STARTING, id="agents are awaited"),
        pytest.param(
            trains(running_since=None), [(pod(0), running()), (pod(1), ready(0))], Phase.RENDEZVOUS, id="not all run"
        ),
        pytest.param(
            trains(best_step=3, phase_times=PhaseTimes(Phase.RENDEZVOUS, NOW)),
            BOTH,
            Phase.LOADING,
            id="the first step is awaited",
        ),
        pytest.param(trains(), BOTH, Phase.TRAINING, id="who reports no steps is believed to train"),
        pytest.param(trains(), STEPS, Phase.TRAINING, id="steps"),
        pytest.param(trains(best_step=60), STEPS, Phase.RECOMPUTING, id="steps that had been made before"),
        pytest.param(
            trains(best_step=60, phase_times=PhaseTimes(Phase.TRAINING, NOW)),
            STEPS,
            Phase.TRAINING,
            id="training does not become repetition",
        ),
        pytest.param(trains(3), [*BOTH, (pod(2, disruption="x"), running())], Phase.DRAINING, id="a drain"),
        pytest.param(
            trains(transition=transition()),
            [(pod(0), agent(AgentState.STOPPING, saving=True)), (pod(1), agent(AgentState.STOPPING))],
            Phase.DRAINING,
            id="some have not heard of it yet",
        ),
        pytest.param(
            trains(transition=transition()),
            [(pod(0), agent(AgentState.STOPPING, saving=True)), (pod(1), ready(1, drained=True))],
            Phase.SAVING,
            id="who has not ended saves",
        ),
        pytest.param(
            trains(transition=transition(depth=Depth.MEMORY)),
            [(pod(n), agent(AgentState.STOPPING, saving=True)) for n in range(2)],
            Phase.DRAINING,
            id="in memory nothing is saved",
        ),
        pytest.param(
            trains(transition=transition(TransitionKind.SUSPEND, target_size=0)),
            [(pod(n), agent(AgentState.STOPPING, saving=True)) for n in range(2)],
            Phase.SAVING,
            id="before a suspension too",
        ),
        pytest.param(
            trains(),
            [(pod(0), faulted()), (pod(1), running())],
            Phase.DETECTING,
            id="workers are being stopped after a fault",
        ),
        pytest.param(
            trains(1, transition=transition(TransitionKind.RECOVERY, target_size=2)),
            [(pod(0), ready(1)), WAITS],
            Phase.WAITING,
            id="a replacement is awaited",
        ),
    ],
)
def test_phases(record: Record, pods: list[tuple[ObservedPod, ObservedAgent | None]], phase: Phase) -> None:
    assert plan(observed(job(record), pods)).record.phase_times.phase == phase


def test_a_suspended_job() -> None:
    wishes = policy(suspend=True)
    first = plan(observed(job(trains(), wishes), BOTH))
    assert first.record.phase_times.phase == Phase.DRAINING
    is_idle = ready(1, drained=True)
    then = plan(observed(job(first.record, wishes), [(pod(0), is_idle), (pod(1), is_idle)]))
    assert then.record.phase_times.phase == Phase.SUSPENDED


def test_the_time_before_the_first_look_is_booked_too() -> None:
    todo = plan(observed(job(None, created_at=NOW - seconds(2.5))))
    assert todo.record.phase_times == PhaseTimes(Phase.SCHEDULING, NOW - seconds(2.5))


def test_a_fault_is_booked_back_to_the_last_step() -> None:
    record = trains(phase_times=PhaseTimes(Phase.TRAINING, NOW - seconds(100)))
    last = NOW - seconds(12)
    todo = plan(
        observed(job(record), [(pod(0), faulted(step=9, step_at=last)), (pod(1), running(step=9, step_at=last))])
    )
    assert todo.record.phase_times == PhaseTimes(Phase.DETECTING, last, (("training", 88_000),), "process")


def test_the_end_stops_the_clock() -> None:
    record = trains(phase_times=PhaseTimes(Phase.TRAINING, NOW - seconds(100)))
    done = agent(AgentState.COMPLETED)
    todo = plan(observed(job(record), [(pod(0), done), (pod(1), done)]))
    assert todo.record.outcome == "Completed"
    assert todo.record.phase_times == PhaseTimes("ended", None, (("training", 100_000),))
    later = plan(observed(job(todo.record), [], now=NOW + seconds(999)))
    assert later.record.phase_times == todo.record.phase_times


def test_nothing_is_written_while_a_phase_lasts() -> None:
    record = plan(observed(job(trains()), STEPS)).record
    assert plan(observed(job(record), STEPS, now=NOW + seconds(3))).record == record


def test_the_end_of_repetition_is_waited_for() -> None:
    todo = plan(observed(job(trains(best_step=60), policy(2, 2)), STEPS))
    assert todo.wake_at == NOW + seconds(22), "eleven steps of two seconds"


def test_a_clock_that_goes_back_books_nothing_twice() -> None:
    record = trains(phase_times=PhaseTimes(Phase.RENDEZVOUS, NOW + seconds(5), (("starting", 7),)))
    phase_times = plan(observed(job(record), STEPS)).record.phase_times
    assert phase_times == PhaseTimes(Phase.TRAINING, NOW + seconds(5), (("starting", 7),))


def test_what_was_booked_meanwhile() -> None:
    before = PhaseTimes(Phase.TRAINING, NOW, (("starting", 700), ("training", 1_000)))
    after = PhaseTimes(Phase.DRAINING, NOW, (("starting", 700), ("training", 3_500)))
    assert phase_times_since(before, after) == {("training", ""): seconds(2.5)}
    assert phase_times_since(before, before) == {}
    assert phase_times_since(before, PhaseTimes(Phase.SCHEDULING, NOW, (("training", 10),))) == {}, (
        "a record that was lost"
    )


def test_goodput_is_the_share_of_training_in_the_time_out_of_queues() -> None:
    ended = PhaseTimes("ended", None, (("queued", 10**9), ("starting", 10_000), ("training", 70_000)))
    trains_on = PhaseTimes(Phase.TRAINING, NOW - seconds(20), (("recomputing", 20_000),))
    assert goodput([ended, trains_on], NOW) == pytest.approx(0.75)
    assert goodput([PhaseTimes(Phase.SUSPENDED, LONG_AGO)], NOW) is None
    assert goodput([PhaseTimes(Phase.STARTING, LONG_AGO)], NOW) == 0.0


SITUATIONS: list[Snapshot] = [
    observed(job(None), pods)
    for pods in (
        [],
        [(pod(0), ready(0)), WAITS],
        BOTH,
        STEPS,
        [(pod(0), faulted()), (pod(1), running())],
        [(pod(0), ready(1)), (pod(1), ready(1))],
        [(pod(0), agent(AgentState.STOPPING)), (pod(1), ready(1, drained=True))],
    )
]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 10**8)), max_size=25))
def test_the_phases_sum_to_the_life_of_the_job(story: list[tuple[int, int]]) -> None:
    """Whatever happens, and however the operator is restarted in between: only the record goes on."""
    now, record = LONG_AGO, None
    for which, later_us in story:
        now += timedelta(microseconds=later_us)
        snapshot = SITUATIONS[which]
        record = plan(replace(snapshot, now=now, job=replace(snapshot.job, record=record))).record
        spent = sum(total(record.phase_times, now).values(), timedelta(0))
        alive = (_ended(record) or now) - LONG_AGO
        assert abs(spent - alive) < timedelta(milliseconds=2)


def _ended(record: Record) -> datetime | None:
    return record.ended_at
