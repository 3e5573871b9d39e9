"""The ledger of jobs that the operator ran in virtual time: it agrees with what the workers did, and operators that die lose nothing.

That its phases sum to the life of the job is checked in every schedule (invariants.balanced).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.sim.events import Event, Make
from tests.sim.invariant_state import Violation
from tests.sim.random_schedules import Schedule
from tests.sim.scripted_jobs import scripted_job as job
from tests.sim.simulation import Simulation
from tests.sim.training import STEP_S

from elastipod_operator.core.phase_accounting import TRAINING_PHASES, total, total_by_depth
from elastipod_operator.core.record import PhaseTimes

SUSPENSION_S = 100.0
CALM = job()
EVENTFUL = job(Event(100, "suspend", 0, SUSPENSION_S), Event(250, "crash_worker", 1))
# In each start the workers make a first step before it is seen, and the last one is made while a phase ends.
SEEN_LATE_S = 8.0


def seconds(times: Mapping[str, timedelta]) -> dict[str, float]:
    return {name: time.total_seconds() for name, time in times.items()}


def ran(schedule: Schedule) -> tuple[Simulation, dict[str, float], dict[str, float]]:
    """Run a schedule to its end; give the time of each phase, and of the changes of each depth."""
    sim = Simulation(schedule).run()
    record = sim.checker.record
    now = sim.kernel.utc()
    return sim, seconds(total(record.phase_times, now)), seconds(total_by_depth(record.phase_times, now))


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(CALM, id="nothing happens"),
        pytest.param(EVENTFUL, id="a suspension and a crash"),
        pytest.param(replace(EVENTFUL, make=Make.KEEPING), id="workers that keep their state"),
        pytest.param(
            job(Event(100, "operator_dies", 1, 60), Event(130, "crash_worker", 0)), id="a crash without operator"
        ),
    ],
)
def test_the_ledger_agrees_with_what_the_workers_did(schedule: Schedule) -> None:
    sim, phases, _ = ran(schedule)
    booked = sum(phases.get(phase, 0) for phase in TRAINING_PHASES)
    made = sim.training.num_steps * STEP_S
    allowed = SEEN_LATE_S * len(sim.training.runs) + sum(
        e.seconds for e in schedule.events if e.what == "operator_dies"
    )
    assert abs(booked - made) <= allowed, phases
    has_suspension = any(event.what == "suspend" for event in schedule.events)
    until_saved = phases.get("saving", 0)  # a save may be slow
    assert abs(phases.get("suspended", 0) + until_saved - SUSPENSION_S * has_suspension) <= SEEN_LATE_S, phases


def test_changes_are_booked_by_their_depth() -> None:
    _, _, none = ran(replace(CALM, nodes=2))
    _, _, processes = ran(EVENTFUL)
    _, _, memory = ran(replace(EVENTFUL, make=Make.KEEPING))
    assert (set(none), set(processes)) == (set(), {"process"})
    assert memory["memory"] > 0


def test_an_operator_that_dies_again_and_again_books_the_same() -> None:
    deaths = [Event(at, "operator_dies", 0) for at in (60, 120, 160, 230, 320)]
    _, alone, by_depth = ran(EVENTFUL)
    events = sorted((*EVENTFUL.events, *deaths), key=lambda event: event.at)
    _, relieved, relieved_by_depth = ran(replace(EVENTFUL, events=tuple(events)))
    assert alone.keys() == relieved.keys()
    assert by_depth.keys() == relieved_by_depth.keys()
    for phase, time in alone.items():
        assert abs(relieved[phase] - time) < 30, phase


def test_a_ledger_that_misses_time_is_a_violation() -> None:
    sim = Simulation(CALM)
    sim.kernel.run(50.0)
    now = sim.kernel.utc()
    sim.checker.balanced(now)
    good = sim.checker.record
    for bad in (
        replace(good.phase_times, booked=()),
        replace(good.phase_times, booked=(*good.phase_times.booked, ("idling", 0))),
        replace(good.phase_times, by_depth=(("memory", 10**9),)),
        PhaseTimes(),
    ):
        sim.checker.record = replace(good, phase_times=bad)
        with pytest.raises(Violation, match="ledger"):
            sim.checker.balanced(now)
    for shell in sim.shells:
        shell.die()
