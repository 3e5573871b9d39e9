"""Stories of jobs in queues that were worth writing down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.sim.events import Event, Make
from tests.sim.kueue_server import QueueSettings
from tests.sim.plain_workloads import PlainGang
from tests.sim.random_schedules import InQueue, Schedule
from tests.sim.scripted_jobs import PATIENT


def _schedule(
    *events: Event,
    quota: tuple[int, ...] = (4,),
    plain_gangs: tuple[PlainGang, ...] = (),
    rivals: tuple[Schedule, ...] = (),
    low: int = 2,
    high: int = 4,
    nodes: int = 4,
    priority: int = 0,
    at: int = 0,
    seed: int = 1,
    specs: list[dict[str, Any]] | None = None,
    **settings: Any,
) -> Schedule:
    return Schedule(
        seed=seed,
        nodes=nodes,
        policy={"minReplicas": low, "maxReplicas": high, **PATIENT},
        specs=specs or [{"name": "workers", "replicas": low, "maxReplicas": high}],
        run_policy={"cleanPodPolicy": "All"},
        heeds_events=True,
        collective_timeout_s=300.0,
        events=events,
        queue=InQueue(QueueSettings(quota, **settings), priority, at, rivals, plain_gangs),
    )


def _rival(priority: int = 0, **more: Any) -> Schedule:
    return _schedule(seed=2, priority=priority, **more)


SMALL = PlainGang(100.0, 2, 0)
WHOLE = PlainGang(100.0, 4, 1000)

QUEUE_SCHEDULES: dict[str, Schedule] = {
    "increments give way to a gang and come back": _schedule(plain_gangs=(SMALL,)),
    "workers keep shards of the state in memory: increments give way to a gang and come back": replace(
        _schedule(plain_gangs=(SMALL,)), make=Make.SHARDING
    ),
    "workers keep shards of the state in memory: one crashes while increments give way to a gang": replace(
        _schedule(Event(101.0, "crash_worker", 0), plain_gangs=(SMALL,)), make=Make.SHARDING
    ),
    "a stronger job leaves a weaker base alone": _schedule(quota=(5,), priority=1000, rivals=(_rival(-10),)),
    "the base gives way to a higher class": _schedule(plain_gangs=(WHOLE,)),
    "two flavors": _schedule(quota=(6,), flavors=2, plain_gangs=(SMALL,)),
    "a node of an increment is lost for good": _schedule(Event(100.0, "delete_node", 2)),
    "somebody deactivates the base": _schedule(Event(100.0, "deactivate", 0, 60.0)),
    "a gang comes first": _schedule(plain_gangs=(PlainGang(0.0, 3, 0, runs_s=100.0),)),
    "its template is edited while it waits for quota": _schedule(
        Event(50.0, "edit_template", 7), plain_gangs=(PlainGang(0.0, 3, 0, runs_s=200.0),)
    ),
    "a gang gives way to a stronger job": _schedule(priority=1000, plain_gangs=(PlainGang(0.0, 3, 0, runs_s=100.0),)),
    "Kueue goes away while it waits for quota": _schedule(Event(101.0, "kueue_away", 0, 60.0), plain_gangs=(SMALL,)),
    "calls to Kueue hang while it waits for the base's quota": _schedule(
        Event(101.0, "kueue_away", 1, 60.0), plain_gangs=(WHOLE,)
    ),
    "Kueue is away when the job comes": _schedule(Event(0.0, "kueue_away", 0, 60.0)),
    "Kueue is slow": _schedule(Event(0.0, "kueue_slow", 0, 200.0), plain_gangs=(SMALL,)),
    "a node is lost in an eviction": _schedule(Event(101.0, "kill_node", 1), plain_gangs=(SMALL,)),
    "the spec cannot be used while Kueue waits for quota": _schedule(Event(95.0, "break_spec", 0, 600.0), plain_gangs=(SMALL,)),
    "the spec cannot be used while Kueue waits for the base": _schedule(Event(95.0, "break_spec", 0, 600.0), plain_gangs=(WHOLE,)),
    **{  # how many pods wait for their turn meanwhile is drawn
        f"increments give way while their pods wait for admission: {seed}": _schedule(
            Event(0.0, "slow_admission", 0, 200.0), plain_gangs=tuple(PlainGang(at, 2, 0) for at in (12.0, 60.0, 90.0)), seed=seed
        )
        for seed in (1, 2)
    },
    "the job is suspended in an eviction": _schedule(Event(101.0, "suspend", 0, 40.0), plain_gangs=(SMALL,)),
    "the job is deleted in an eviction": _schedule(Event(101.0, "delete_job"), plain_gangs=(SMALL,)),
    "the job is deleted while increments wait and workers save": replace(
        _schedule(Event(100.0, "drain_and_delete_job"), quota=(3,)), heeds_events=False
    ),
    "Kueue is away when the job is deleted": _schedule(Event(99.0, "kueue_away", 0, 60.0), Event(100.0, "delete_job")),
    "calls to Kueue hang when the job is deleted": _schedule(Event(99.0, "kueue_away", 1, 60.0), Event(100.0, "delete_job")),
    "lists of Workloads hang when the job is deleted": _schedule(Event(29.0, "lists_hang", 0, 150.0), Event(30.0, "delete_job")),
    "lists of Workloads hang when the job is deleted, and its pods are gone at once": _schedule(
        Event(29.0, "lists_hang", 0, 150.0), Event(30.0, "delete_job"), *2 * [Event(30.3, "force_delete_pod", 0)], high=2
    ),
    "lists of Workloads hang when the job comes": _schedule(Event(0.0, "lists_hang", 0, 60.0)),
    "the base is taken back in a recovery": _schedule(Event(99.9, "crash_worker", 0), plain_gangs=(WHOLE,)),
    "a queue is on hold": _schedule(Event(0.0, "stop_queue", 0, 60.0)),
    "a queue is drained": _schedule(Event(100.0, "stop_queue", 7, 60.0)),
    "a namespace's queue is drained": _schedule(Event(100.0, "stop_local_queue", 7, 60.0)),
    "somebody deactivates an increment": _schedule(Event(100.0, "deactivate", 1, 60.0)),
    "somebody deletes the base": _schedule(Event(100.0, "delete_workload", 0)),
    "somebody deletes the base, and another flavor has room": _schedule(
        Event(100.0, "delete_workload", 0), quota=(4,), flavors=2, high=2,
        plain_gangs=(PlainGang(10.0, 2, 0, runs_s=90.5), PlainGang(50.0, 2, 0, runs_s=100.0)),
    ),
    "the watch misses the end of the pods while the base gives way": _schedule(
        Event(102.0, "broken_watch", 0, 40.0), plain_gangs=(WHOLE,)
    ),
    "the watch misses the end of the pods after somebody deleted the base": _schedule(
        Event(100.0, "delete_workload", 0), Event(102.0, "broken_watch", 0, 40.0), flavors=2, high=2,
        plain_gangs=(PlainGang(10.0, 2, 0, runs_s=90.5), PlainGang(50.0, 2, 0, runs_s=100.0)),
    ),
    "somebody deletes an increment": _schedule(Event(100.0, "delete_workload", 1)),
    "the quota shrinks and grows": _schedule(Event(60.0, "edit_quota", 7 * 2), plain_gangs=(PlainGang(100.0, 1, 0),)),
    "two jobs share a queue": _schedule(quota=(7,), rivals=(_rival(),)),
    "there is room for one job only": _schedule(quota=(3,), rivals=(_rival(),)),
    "a stronger job comes back from another queue": _schedule(
        quota=(4, 2), priority=1000, rivals=(_rival(0, at=1),), plain_gangs=(PlainGang(150.0, 2, 10, queue=1),)
    ),
    "the class of a job is lowered": _schedule(Event(100.0, "edit_priority", 0), quota=(5,), rivals=(_rival(10),)),
    "increments wait in order": _schedule(strategy="StrictFIFO", quota=(5,), rivals=(_rival(),), plain_gangs=(SMALL,)),
    "there is quota but no node": _schedule(nodes=3),
    "the user scales down and up": _schedule(Event(60.0, "scale", 1), Event(120.0, "scale", 0)),
    "the minimum is lowered while the job trains": _schedule(Event(100.0, "set_bounds", 6), plain_gangs=(PlainGang(200.0, 2, 0),)),
    "the minimum is lowered, and the quota taken back": _schedule(
        Event(100.0, "set_bounds", 6), plain_gangs=(PlainGang(150.0, 4, 1000),)
    ),
    "the minimum is lowered, and the job suspended": _schedule(
        Event(100.0, "set_bounds", 9), Event(150.0, "suspend", 0, 40.0)
    ),
    "minimum and maximum are lowered below the base": _schedule(Event(100.0, "set_bounds", 0)),
    "a spare is added while the job trains": _schedule(Event(100.0, "set_spares", 1), quota=(5,), nodes=5),
    "a spare is added and the minimum lowered, so that increments stand for other pods": _schedule(
        Event(100.0, "set_spares", 1), Event(200.0, "set_bounds", 6), quota=(7,), nodes=7, high=6,
        specs=[{"name": "base", "replicas": 2}, {"name": "extra", "replicas": 0, "maxReplicas": 4}],
    ),
    "a spare is added, and the quota taken back": _schedule(
        Event(100.0, "set_spares", 1), quota=(5,), nodes=5, plain_gangs=(PlainGang(150.0, 4, 1000),)
    ),
    "a spare is added, and the job suspended": _schedule(
        Event(100.0, "set_spares", 1), Event(150.0, "suspend", 0, 40.0), quota=(5,), nodes=5
    ),
    "a spare is taken away while the job trains": _schedule(
        Event(100.0, "set_spares", 0), quota=(5,), nodes=5, specs=[{"name": "workers", "replicas": 2, "maxReplicas": 4, "spares": 1}],
    ),
    "pods are not ready in time": _schedule(
        Event(150.0, "add_node"), Event(150.0, "add_node"), Event(150.0, "add_node"), nodes=1, pods_ready_s=60
    ),
    "a node of the base is lost, and pods must be ready in time": _schedule(
        Event(100.0, "delete_node", 0), Event(300.0, "add_node"), pods_ready_s=60
    ),
    "a spare is in the base": _schedule(
        Event(100.0, "kill_node", 0), quota=(5,), nodes=5, plain_gangs=(PlainGang(150.0, 2, 0),),
        specs=[{"name": "workers", "replicas": 2, "maxReplicas": 4, "spares": 1}],
    ),
}  # fmt: skip

QUEUE_TURNS: dict[str, tuple[float, float, Schedule]] = {
    "an eviction of increments": (99.9, 120.0, _schedule(plain_gangs=(SMALL,))),
    "an eviction of the base": (99.9, 120.0, _schedule(plain_gangs=(WHOLE,))),
    "a start in a queue": (0.0, 30.0, _schedule()),
}
"""Turns of the life of a job in a queue, as in `scripted.TURNS`."""
