"""Stories of trainings that end while something else happens, and of a storage that is away, full or slow."""

from __future__ import annotations

from tests.sim.events import Event, Make
from tests.sim.random_schedules import Schedule
from tests.sim.scripted_jobs import scripted_job

END_S = 100.0
# A job that may be tried so often outlives a storage that is away for half a minute.
MANY = 50
# What happens at about the time when the last step is made.
TROUBLES: dict[str, tuple[Event, ...]] = {
    "nothing happens": (),
    "a worker crashes": (Event(END_S + 1, "crash_worker", 1),),
    "a node is drained": (Event(END_S, "drain_node", 0),),
    "a node loses power": (Event(END_S + 1, "kill_node", 1),),
    "the job is suspended": (Event(END_S + 1, "suspend", 0, 30),),
    "the user scales down": (Event(END_S + 1, "scale", 1),),
    "the record is lost": (Event(END_S + 0.5, "wipe_record"),),
    "calls get lost": (Event(END_S - 1, "lossy_calls", 0, 30), Event(END_S, "scale", 1)),
    "no agent can be reached": (Event(END_S - 1, "hide_all", 0, 40),),
    "one agent cannot be reached": (Event(END_S - 1, "hide_node", 1, 40),),
    "the API server is away": (Event(END_S - 1, "api_down", 0, 40),),
    "a node is tainted, and the operator is away": (Event(END_S - 1, "operator_dies", 1, 30), Event(END_S + 18, "taint_node", 0)),
    "the job is suspended, and the operator is away": (Event(END_S - 1, "operator_dies", 1, 30), Event(END_S + 18, "suspend", 0, 60)),
    "a node loses power, and the operator is away": (Event(END_S - 1, "operator_dies", 1, 30), Event(END_S + 18, "kill_node", 0)),
    "two operators act at once": (Event(END_S - 20, "second_operator", 0, 60), Event(END_S, "drain_node", 0)),
    "a growth is due": (Event(END_S - 8, "add_node"), Event(END_S - 2, "scale", 0)),
}  # fmt: skip
STORAGE: dict[str, tuple[Event, ...]] = {
    "away in a drain": (Event(99, "storage_away", 0, 30), Event(100, "drain_node", 0)),
    "full in a drain": (Event(99, "storage_full", 0, 30), Event(100, "drain_node", 0)),
    "slow in a drain": (Event(99, "storage_slow", 0, 120), Event(100, "drain_node", 0)),
    "away in a recovery": (Event(99, "storage_away", 0, 30), Event(100, "crash_worker", 0)),
    "slow in a recovery": (Event(99, "storage_slow", 0, 60), Event(100, "crash_worker", 0)),
    "full for long": (Event(40, "storage_full", 0, 200), Event(300, "scale", 1)),
    "away, and a node that is cut off comes back": (
        Event(100, "cut_node", 0, 100), Event(130, "storage_away", 0, 20), Event(230, "crash_worker", 0),
    ),
}  # fmt: skip

ENDING_SCHEDULES: dict[str, Schedule] = {
    **{f"the training ends: {what}": scripted_job(*events, completes_at=END_S) for what, events in TROUBLES.items()},
    **{
        f"the training ends, of workers that keep their state: {what}": scripted_job(
            *TROUBLES[what], completes_at=END_S, make=Make.KEEPING
        )
        for what in ("a worker crashes", "a node is drained", "the user scales down")
    },
    **{f"the storage is {what}": scripted_job(*events, retries=MANY) for what, events in STORAGE.items()},
    "the storage is away in a recovery of workers that keep their state": scripted_job(
        *STORAGE["away in a recovery"], make=Make.KEEPING, retries=MANY
    ),
    **{
        f"the storage is {how} when the training ends": scripted_job(
            Event(END_S - 1, f"storage_{how}", 0, 30), completes_at=END_S, retries=MANY
        )
        for how in ("away", "full", "slow")
    },
}  # fmt: skip
