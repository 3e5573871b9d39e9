"""Stories of pods with several workers each."""

from __future__ import annotations

from tests.sim.events import Event, Make
from tests.sim.random_schedules import Schedule
from tests.sim.scripted_jobs import scripted_job

WORKER_SCHEDULES: dict[str, Schedule] = {
    f"several workers in each pod: {what}": scripted_job(*events, nproc=4, make=make)
    for what, make, events in (
        ("a node is drained", Make.OURS, (Event(100, "drain_node", 0),)),
        ("one of them crashes", Make.OURS, (Event(100, "crash_worker", 3),)),
        ("one of them crashes, and all outlive it", Make.IN_PROCESS, (Event(100, "crash_worker", 3), Event(160, "kill_node", 1))),
        ("one of them crashes in a drain", Make.OURS, (Event(100, "drain_node", 0), Event(101.2, "crash_worker", 3))),
        ("they keep their state", Make.KEEPING, (Event(100, "crash_worker", 3), Event(160, "scale", 1))),
        (
            "their number is edited", Make.IN_PROCESS, (
                Event(60, "edit_worker_count", 1), Event(100, "crash_worker", 0), Event(130, "kill_node", 1), Event(140, "add_node"),
                Event(180, "suspend", 0, 30), Event(260, "crash_worker", 1),
            ),
        ),
        ("their number is edited before anything trains", Make.OURS, (Event(1, "edit_worker_count", 1),)),
    )
}  # fmt: skip
