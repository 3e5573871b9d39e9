"""Stories of jobs whose operator and agents sign what they tell each other."""

from __future__ import annotations

from dataclasses import replace

from tests.sim.events import Event, Make
from tests.sim.neighbour_schedules import CRASHES
from tests.sim.random_schedules import Schedule
from tests.sim.scripted_jobs import scripted_job

KEY_SCHEDULES: dict[str, Schedule] = {
    f"with keys: {what}": scripted_job(*events, has_keys=True)
    for what, events in (
        ("nothing happens", ()),
        ("calls are replayed in a drain", (Event(100, "drain_node", 0), Event(100.5, "replay_calls"), Event(140, "replay_calls"))),
        ("somebody answers in the place of an agent", (Event(100, "impostor", 1, 40), Event(160, "scale", 1))),
        ("the install key is replaced, and a node is lost", (Event(100, "rotate_key"), Event(120, "kill_node", 1), Event(125, "add_node"))),
        ("the Secret is deleted, and a pod too", (Event(90, "delete_secret"), Event(100, "delete_pod", 1))),
        ("the Secret is deleted while pods begin", (Event(1.5, "delete_secret"), Event(3.0, "delete_secret"))),
        ("somebody else has made the Secret", (Event(0.3, "take_secret", 0, 60),)),
        ("the operator dies in a recovery", (Event(100, "crash_worker", 0), Event(100.3, "operator_dies", 0, 3))),
    )
} | {
    "with keys: two jobs of one name, and a worker crashes": replace(
        scripted_job(Event(100, "drain_node", 0), has_keys=True), neighbours=(CRASHES,)
    ),
    "with keys: agents of another make": scripted_job(Event(100, "crash_worker", 0), has_keys=True, make=Make.FOREIGN),
}  # fmt: skip
