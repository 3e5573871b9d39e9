"""Stories of several jobs that one operator runs: what happens to one of them costs the others nothing."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.events import Event, Make
from tests.sim.random_schedules import Schedule
from tests.sim.scripted_jobs import scripted_job

CRASHES = scripted_job(Event(110, "crash_worker", 0), low=1, high=2, nodes=2, seed=2)
DRAINED = scripted_job(Event(110, "drain_node", 0), low=1, high=2, nodes=2, seed=3)


def _beside(first: Schedule, *others: Schedule) -> Schedule:
    return replace(first, neighbours=others)


NEIGHBOUR_SCHEDULES: dict[str, Schedule] = {
    f"a worker crashes beside a job {what}": _beside(first, CRASHES)
    for what, first in (
        ("to which nothing happens", scripted_job()),
        ("whose calls fail", scripted_job(Event(90, "api_down", 0, 60), Event(95, "crash_worker", 0))),
        ("of which all writes meet another's", scripted_job(Event(90, "busy_job", 0, 60), Event(95, "crash_worker", 0))),
        ("that is deleted", scripted_job(Event(105, "delete_job"))),
        ("whose agents cannot be reached", scripted_job(Event(90, "hide_all", 0, 90))),
        ("whose pods wait for admission", scripted_job(Event(90, "slow_admission", 0, 90), Event(95, "delete_pod", 0))),
        ("with a template that is none", scripted_job(Event(90, "break_spec", 3, 90))),
        ("whose agent tells data without end", scripted_job(Event(90, "agent_lies", 7 * 8, 60), make=Make.IN_PROCESS)),
        ("that ends", scripted_job(completes_at=105)),
        ("that loses its rack", scripted_job(Event(105, "lose_rack"))),
    )
} | {
    "three jobs, and their operator dies in all their troubles": replace(
        _beside(scripted_job(Event(110, "kill_node", 1)), CRASHES, DRAINED), events=(
            Event(110, "kill_node", 1), Event(110.3, "operator_dies", 0, 2),
        ),
    ),
}  # fmt: skip
NEIGHBOUR_TURNS: dict[str, tuple[float, float, Schedule]] = {
    "a crash beside the drain of another job": (
        109.9,
        135.0,
        _beside(scripted_job(Event(110, "crash_worker", 1)), DRAINED),
    ),
}
