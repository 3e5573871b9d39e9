"""What goes wrong in a schedule, and its shortest form that still fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tests.sim.random_schedules import Schedule
from tests.sim.simulation import Simulation


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Leave events out, one after the other, as long as the schedule still fails."""
    at = 0
    while at < len(schedule.events):
        shorter = replace(schedule, events=schedule.events[:at] + schedule.events[at + 1 :])
        if fails(shorter):
            schedule = shorter
        else:
            at += 1
    return schedule


def failure_of(schedule: Schedule, met: Counter[str] | None = None) -> BaseException | None:
    """Run a schedule; give what went wrong. met: takes in what was met in it."""
    sim = Simulation(schedule)
    try:
        sim.run()
    except Exception as error:  # whatever the code under test raises is a finding
        return error
    if met is not None:
        met.update(sim.met)
    return None


def explain(schedule: Schedule) -> str:
    """Tell a failing schedule in its shortest form, with the log of its run."""
    short = shrink(schedule, lambda s: failure_of(s) is not None)
    sim = Simulation(short)
    try:
        sim.run()
    except Exception as error:  # as above
        text = f"{type(error).__name__}: {error}"
        return "\n".join([text, "", str(short), "", *sim.log[-60:]])
    return f"the schedule does not fail when it runs again:\n{short}"
