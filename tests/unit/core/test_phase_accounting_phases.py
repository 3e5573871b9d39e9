"""Which phase a job is in, since when, and how the times of phases are kept."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.unit.core.builders import (
    LONG_AGO,
    NOW,
    Seen,
    job,
    observed,
    pod,
    ready,
    running,
    seconds,
    silent,
    trains,
    transition,
)
from tests.unit.core.conditions.reports import RUN, waits

from elastipod_operator.core.health import assess
from elastipod_operator.core.phase_accounting import (
    Phase,
    account_phases,
    goodput,
    next_phase_change,
    phase_of,
    phase_times_since,
    total,
    total_by_depth,
)
from elastipod_operator.core.record import (
    RECORD_LOST,
    Depth,
    PhaseTimes,
    Record,
    TransitionKind,
)
from elastipod_operator.core.snapshot import ObservedAgent


def kept(phase_times: PhaseTimes, *pods: Seen, now: datetime = NOW, **changes: Any) -> PhaseTimes:
    record = trains(phase_times=phase_times, **changes)
    snapshot = observed(job(record, created_at=LONG_AGO + timedelta(microseconds=999)), pods, now=now)
    return account_phases(record, snapshot, assess(snapshot)).phase_times


def test_the_first_phase_begins_with_the_job() -> None:
    assert kept(PhaseTimes(), generation=0) == PhaseTimes("training", NOW, (("scheduling", 3_600_000),))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"generation": 1}, id="it has trained"),
        pytest.param(
            {"generation": 0, "transition": transition(TransitionKind.START, cause=RECORD_LOST)}, id="it had pods"
        ),
        pytest.param({"generation": 0, "outcome": "Failed", "ended_at": NOW}, id="it had ended"),
    ],
)
def test_nobody_knows_the_time_before_a_record_was_lost(changes: dict[str, Any]) -> None:
    assert kept(PhaseTimes(), *RUN, **changes).booked == (("unknown", 3_600_000),)


CHANGED = PhaseTimes("rendezvous", NOW - seconds(2), depth="memory")


@pytest.mark.parametrize(
    ("before", "changes", "depth", "by_depth"),
    [
        pytest.param(
            PhaseTimes("training", NOW - seconds(2)), {"transition": transition(depth=Depth.MEMORY)},
            "memory", (), id="training before a change belongs to none",
        ),
        pytest.param(
            PhaseTimes("training", NOW - seconds(2)),
            {"transition": transition(TransitionKind.RECOVERY, recreates_pods=True)},
            "job", (), id="a full restart is a deep one",
        ),
        pytest.param(
            PhaseTimes("training", NOW - seconds(2)), {"transition": transition(TransitionKind.SUSPEND)},
            "", (), id="a suspension is no change of the world",
        ),
        pytest.param(CHANGED, {"running_since": None}, "memory", (), id="a new generation goes on with the change"),
        pytest.param(CHANGED, {}, "", (("memory", 2_000),), id="new steps end it"),
        pytest.param(
            CHANGED, {"transition": transition(TransitionKind.RECOVERY)},
            "process", (("memory", 2_000),), id="a fault during a change begins another",
        ),
        pytest.param(
            PhaseTimes("draining", NOW - seconds(2), depth="memory"), {"transition": transition(depth=Depth.PROCESS)},
            "process", (), id="a phase belongs to the depth that its change turns out to have",
        ),
        pytest.param(
            PhaseTimes("loading", NOW - seconds(2), by_depth=(("pod", 7),)), {},
            "", (("pod", 7),), id="the first start is no change",
        ),
    ],
)  # fmt: skip
def test_the_time_of_changes_is_booked_by_their_depth(
    before: PhaseTimes, changes: dict[str, Any], depth: str, by_depth: tuple[tuple[str, int], ...]
) -> None:
    after = kept(before, *RUN, **changes)
    assert (after.depth, after.by_depth) == (depth, by_depth)


def test_what_later_versions_call_their_phases_is_unknown_here() -> None:
    later = PhaseTimes(
        "idling", NOW - seconds(2), (("idling", 5), ("training", 7)), "deepest", (("deepest", 4), ("pod", 3))
    )
    assert kept(later, *RUN) == PhaseTimes(
        "training", NOW, (("training", 7), ("unknown", 2_005)), by_depth=(("pod", 3),)
    )  # fmt: skip


def test_what_changes_took_so_far() -> None:
    now = PhaseTimes("loading", NOW - seconds(2), depth="process", by_depth=(("memory", 300), ("process", 1_000)))
    assert total_by_depth(now, NOW) == {"memory": timedelta(milliseconds=300), "process": seconds(3)}
    before = PhaseTimes("loading", NOW, (("loading", 5),), "process")
    after = PhaseTimes("training", NOW, (("loading", 3_005),), by_depth=(("process", 3_000),))
    assert phase_times_since(before, after) == {("loading", "process"): seconds(3)}


def test_a_ledger_that_stopped_does_not_go_on() -> None:
    for ended in (
        PhaseTimes("ended", None, (("training", 5),)),
        PhaseTimes("ended", None),
        PhaseTimes("", None, (("training", 5),)),
    ):
        assert kept(ended, *RUN) == ended


def test_phases_add_up_in_the_order_of_their_names() -> None:
    before = PhaseTimes("loading", NOW - seconds(2), (("loading", 1000), ("starting", 7)))
    step = [(pod(n), running(step=1, step_at=NOW)) for n in range(2)]
    assert kept(before, *step) == PhaseTimes("training", NOW, (("loading", 3000), ("starting", 7)))
    instant = PhaseTimes("draining", NOW)
    assert kept(instant, *RUN) == PhaseTimes("training", NOW), "what took no time is not named"


def test_times_are_cut_to_the_millisecond() -> None:
    now = NOW + timedelta(microseconds=1_999)
    assert kept(PhaseTimes("starting", NOW), *RUN, now=now) == PhaseTimes(
        "training", NOW + timedelta(milliseconds=1), (("starting", 1),)
    )
    assert total(PhaseTimes("starting", NOW), now) == {"starting": timedelta(milliseconds=1)}
    assert total(PhaseTimes("ended", None, (("starting", 2),)), now) == {"starting": timedelta(milliseconds=2)}


def test_what_was_booked_since() -> None:
    before = PhaseTimes("training", NOW, (("starting", 5), ("training", 7)))
    after = PhaseTimes("ended", None, (("draining", 1), ("starting", 5), ("training", 9)))
    assert phase_times_since(before, after) == {
        ("draining", ""): timedelta(milliseconds=1),
        ("training", ""): timedelta(milliseconds=2),
    }


def test_goodput_is_the_share_of_training_in_what_is_not_somebody_elses_time() -> None:
    one = PhaseTimes(
        "training", NOW - seconds(6), (("queued", 99_000), ("starting", 2_000), ("suspended", 99_000), ("unknown", 9))
    )
    other = PhaseTimes("ended", None, (("recomputing", 1_000), ("training", 3_000)))
    assert goodput([one, other], NOW) == 0.75
    assert goodput([], NOW) is None
    assert goodput([PhaseTimes("training", NOW - seconds(0.0009))], NOW) is None, "whole milliseconds count"
    assert goodput([PhaseTimes("queued", NOW - seconds(9))], NOW) is None


@pytest.mark.parametrize(
    ("phase", "since_s", "ago"),
    [
        pytest.param("training", 100, 12, id="training: since the last step"),
        pytest.param("recomputing", 100, 12, id="steps made again: as well"),
        pytest.param("training", 5, 5, id="never before the phase itself"),
        pytest.param("draining", 100, 0, id="a drain: since now"),
    ],
)
def test_since_when_a_fault_is_detected(phase: str, since_s: float, ago: float) -> None:
    began = transition(TransitionKind.RECOVERY)
    pods = [(pod(n), running(step=9, step_at=NOW - seconds(12 + 3 * n))) for n in range(2)]
    after = kept(PhaseTimes(phase, NOW - seconds(since_s)), *pods, transition=began)
    assert (after.phase, after.since) == ("detecting", NOW - seconds(ago))


@pytest.mark.parametrize(
    ("record", "pods", "phase"),
    [
        pytest.param(trains(transition=transition(TransitionKind.RECOVERY)), [], Phase.DETECTING, id="not weighed"),
        pytest.param(
            trains(transition=transition(TransitionKind.RECOVERY, is_budget_checked=True)),
            RUN,
            Phase.WAITING,
            id="weighed",
        ),
        pytest.param(trains(transition=transition(TransitionKind.SUSPEND)), [], Phase.SUSPENDED, id="nobody works"),
        pytest.param(
            trains(transition=transition(TransitionKind.SUSPEND)), [(pod(0), silent(20))], Phase.DRAINING, id="one may"
        ),
        pytest.param(
            trains(transition=transition(TransitionKind.SUSPEND)),
            [(pod(0, phase="Failed"), running())],
            Phase.SUSPENDED,
            id="ended",
        ),
        pytest.param(
            trains(transition=transition()), [(pod(0), ready(1)), (pod(1), ready(1))], Phase.STARTING, id="all stopped"
        ),
        pytest.param(
            trains(transition=transition(target_size=3)),
            [(pod(0), ready(1)), (pod(1), ready(1))],
            Phase.SCHEDULING,
            id="no place",
        ),
        pytest.param(
            trains(transition=transition()),
            [(pod(2), running()), (pod(3), running())],
            Phase.STARTING,
            id="not strangers",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START)),
            [(pod(0), running()), (pod(1), running())],
            Phase.STARTING,
            id="a start",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START)),
            [(pod(0), running()), waits(1)],
            Phase.SCHEDULING,
            id="without a place",
        ),
        pytest.param(
            Record(transition=transition(TransitionKind.START)),
            [(pod(0), running()), (pod(1, phase="Failed"), None)],
            Phase.SCHEDULING,
            id="who ended has none",
        ),
        pytest.param(
            trains(best_step=9),
            [(pod(n), running(step=9)) for n in range(2)],
            Phase.RECOMPUTING,
            id="a step made before",
        ),
        pytest.param(
            trains(best_step=9), [(pod(n), running(step=9 + n)) for n in range(2)], Phase.TRAINING, id="a new one"
        ),
        pytest.param(
            trains(best_step=9, generation=2),
            [(pod(n), running(1, step=5)) for n in range(2)],
            Phase.TRAINING,
            id="steps of another generation do not count",
        ),
        pytest.param(
            trains(best_step=0, phase_times=PhaseTimes("loading", NOW)),
            RUN,
            Phase.LOADING,
            id="the first step is awaited",
        ),
        pytest.param(
            trains(best_step=-1, phase_times=PhaseTimes("loading", NOW)),
            RUN,
            Phase.TRAINING,
            id="not of who never told one",
        ),
    ],
)
def test_phase(record: Record, pods: list[Seen], phase: Phase) -> None:
    assert phase_of(record, assess(observed(job(record), pods))) is phase


@pytest.mark.parametrize(
    ("phase", "best", "agents", "wait_s"),
    [
        pytest.param("training", 9, [running(step=5)], None, id="nothing is made again"),
        pytest.param("recomputing", 9, [running()], None, id="nobody tells a step"),
        pytest.param("recomputing", 9, [running(step=5, step_pace=seconds(3))], 15, id="the steps that are left"),
        pytest.param(
            "recomputing",
            9,
            [running(step=5, step_pace=seconds(3)), running(step=7, step_pace=seconds(2))],
            6,
            id="the first",
        ),
        pytest.param("recomputing", 3, [running(step=0, step_pace=seconds(2))], 8, id="from the first one on"),
        pytest.param("recomputing", 9, [running(step=5)], 25, id="at five seconds where nobody says"),
        pytest.param("recomputing", 9, [running(step=20, step_pace=seconds(3))], 3, id="one at least"),
        pytest.param("recomputing", 9, [running(step=9, step_pace=seconds(0.1))], 1, id="a second at least"),
    ],
)
def test_when_steps_are_new_again(phase: str, best: int, agents: list[ObservedAgent], wait_s: float | None) -> None:
    record = trains(len(agents), best_step=best, phase_times=PhaseTimes(phase, NOW))
    replicas = assess(observed(job(record), [(pod(n), mine) for n, mine in enumerate(agents)]))
    assert next_phase_change(record, replicas, NOW) == (None if wait_s is None else NOW + seconds(wait_s))
