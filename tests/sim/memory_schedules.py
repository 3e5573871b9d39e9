"""Stories of workers that keep their state in memory, and of machines of Spot."""

from __future__ import annotations

from typing import Any

from tests.sim.events import Event, Make, Preparing
from tests.sim.random_schedules import Schedule
from tests.sim.scripted_jobs import scripted_job

# Troubles of workers that keep their state in memory.
IN_MEMORY: tuple[tuple[str, tuple[Event, ...], dict[str, Any]], ...] = (
    ("a growth and a shrink", (Event(60, "scale", 1), Event(100, "scale", 0)), {}),
    ("a worker crashes", (Event(100, "crash_worker", 0),), {}),
    ("two workers crash", (Event(100, "crash_worker", 0), Event(103, "crash_worker", 1)), {}),
    *(
        (
            f"a worker crashes, and again {late:g} s after a shrink began",
            (Event(40, "crash_worker", 0), Event(100, "scale", 1), Event(100 + late, "crash_worker", 0)),
            {},
        )
        for late in (
            2.5,
            4.0,
            5.5,
            7.0,
            10.0,
            13.0,
            16.0,
            19.0,
            22.0,
        )  # the ranks begin the next generation at a time that the seed decides
    ),
    *(
        (
            f"a decided growth, {what} after {late:g} s",
            (Event(60, "scale", 1), Event(100, "scale", 0), Event(108 + late, *event)),
            {},
        )
        for late in (0.5, 2.0, 3.5, 4.8)  # its agents begin it at a time that the seed decides
        for what, event in (
            ("called off", ("scale", 1)),
            ("newcomer gone", ("kill_container", 2)),
            ("a node ends", ("kill_node", 1)),
            ("a node is drained", ("drain_node", 1)),
            ("suspended", ("suspend", 0, 30)),
            ("the operator dies", ("operator_dies", 0, 3)),
        )
    ),
    ("a node is drained", (Event(100, "drain_node", 0),), {}),
    ("a node loses power", (Event(100, "kill_node", 1),), {}),
    ("a node loses power in a drain", (Event(100, "drain_node", 0), Event(101, "kill_node", 1)), {}),
    ("a container ends", (Event(100, "kill_container", 1),), {}),
    ("a worker asks for new processes", (Event(100, "crash_worker", 7 * 2),), {}),
    ("a worker asks for new pods", (Event(100, "crash_worker", 7 * 3),), {}),
    (
        "the user wants new processes",
        (Event(100, "crash_worker", 0), Event(150, "scale", 1)),
        {"ours": {"recovery": "Process"}},
    ),
    ("the operator dies in a recovery", (Event(100, "crash_worker", 0), Event(100.3, "operator_dies", 0, 3)), {}),
    ("the operator dies in a drain", (Event(100, "scale", 1), Event(100.3, "operator_dies", 0, 3)), {}),
    ("a worker crashes in a drain", (Event(100, "scale", 1), Event(100.4, "crash_worker", 0)), {}),
    ("the job is suspended and resumed", (Event(100, "suspend", 0, 30),), {}),
    *(
        (
            f"the job is suspended in a resize, after {late:g} s",
            (Event(100, "scale", 1), Event(100 + late, "suspend", 0, 30)),
            {},
        )
        for late in (0.1, 1.5, 3.0)
    ),
)

ANY_SIZE: dict[str, Any] = {"low": 1, "step": 1}
# Troubles of workers whose state is sharded. Sizes are 2 and 4, so who goes takes another along.
IN_SHARDS: tuple[tuple[str, tuple[Event, ...], dict[str, Any]], ...] = (
    ("the user scales down and up", (Event(100, "scale", 1), Event(160, "scale", 0)), {}),
    ("a node is drained", (Event(100, "drain_node", 0),), {}),
    ("a node is tainted", (Event(100, "taint_node", 3),), {}),
    ("a node loses power", (Event(100, "kill_node", 1),), {}),
    ("a worker crashes", (Event(100, "crash_worker", 0),), {}),
    ("a worker crashes in a drain", (Event(100, "scale", 1), Event(100.4, "crash_worker", 0)), {}),
    ("one that is to leave crashes in a drain", (Event(100, "scale", 1), Event(100.4, "crash_worker", 3)), {}),
    *(
        (f"a worker crashes in a drain, because {why}", (doom, Event(100.4, "crash_worker", 0)), {})
        for why, doom in {
            "a node is drained": Event(100, "drain_node", 3),
            "a node is tainted": Event(100, "taint_node", 3),
            "a machine of Spot is taken back": Event(100, "spot_notice", 3, 30),
        }.items()
    ),
    (
        "a worker crashes in a drain, and the operator dies",
        (Event(100, "scale", 1), Event(100.4, "crash_worker", 0), Event(100.6, "operator_dies", 0, 3)), {},
    ),
    ("the operator dies in a drain", (Event(100, "scale", 1), Event(100.3, "operator_dies", 0, 3)), {}),
    ("two operators act at once", (Event(60, "second_operator", 0, 200), Event(100, "scale", 1)), {}),
    ("calls get lost", (Event(95, "lossy_calls", 0, 60), Event(100, "scale", 1)), {}),
    ("the job is suspended in a drain", (Event(100, "scale", 1), Event(100.5, "suspend", 0, 30)), {}),
    *(
        (f"the user scales down twice, {late:g} s apart", (Event(100, "scale", 3), Event(100 + late, "scale", 1)), ANY_SIZE)
        for late in (0.5, 2.0, 4.0)
    ),
    *(
        (f"a node is tainted {late:g} s after a shrink began", (Event(100, "scale", 3), Event(100 + late, "taint_node", 0)), ANY_SIZE)
        for late in (0.5, 2.0, 4.0)
    ),
)  # fmt: skip

# A machine of Spot is taken back.
SPOT: tuple[tuple[str, tuple[Event, ...], Make], ...] = (
    ("a notice of 120 s", (Event(100, "spot_notice", 0, 120),), Make.OURS),
    ("a notice of 30 s", (Event(100, "spot_notice", 0, 30),), Make.OURS),
    ("a notice of 30 s, and workers that keep their state", (Event(100, "spot_notice", 0, 30),), Make.KEEPING),
    ("two notices of 30 s", (Event(100, "spot_notice", 0, 30), Event(101.5, "spot_notice", 1, 30)), Make.KEEPING),
    (
        "a notice of 30 s while two nodes do not reach each other",
        (Event(100, "part_nodes", 0, 60), Event(100.5, "spot_notice", 0, 30)),
        Make.OURS,
    ),
)

GROWS = (Event(60, "add_node"),)
# Troubles of workers that start ahead of the growth that takes them: a node comes at 60, its pod's agent answers soon after.
PREPARED: tuple[tuple[str, tuple[Event, ...], Preparing], ...] = (
    *((how.value, GROWS, how) for how in Preparing),
    *(
        (f"their pod's node is lost at {at:g}", (*GROWS, Event(at, "kill_node", 2)), Preparing.SUCCEEDS)
        for at in (64, 68, 72)
    ),
    *(
        (f"the operator dies at {at:g}", (*GROWS, Event(at, "operator_dies", 0, 3)), Preparing.SUCCEEDS)
        for at in (64, 68, 72)
    ),
    (
        "they never come, and operators die",
        (*GROWS, *(Event(at, "operator_dies", 0, 9) for at in (70, 150, 250, 350))),
        Preparing.HANGS,
    ),
    ("a worker crashes meanwhile", (*GROWS, Event(66, "crash_worker", 0)), Preparing.HANGS),
    ("the job is suspended meanwhile", (*GROWS, Event(66, "suspend", 0, 30)), Preparing.HANGS),
    ("calls get lost", (Event(55, "lossy_calls", 0, 60), *GROWS), Preparing.SUCCEEDS),
)
# The user wants new processes at each change: those of pods that stay start as soon as the old ones have ended.
RENEWED: tuple[tuple[str, tuple[Event, ...], Preparing], ...] = (
    *((how.value, GROWS, how) for how in Preparing),
    ("calls get lost", (Event(55, "lossy_calls", 0, 90), *GROWS), Preparing.SUCCEEDS),
    ("a worker crashes afterwards", (*GROWS, Event(100, "crash_worker", 0)), Preparing.SUCCEEDS),
    ("the job is suspended meanwhile", (*GROWS, Event(68, "suspend", 0, 30)), Preparing.SUCCEEDS),
    *(
        (f"{what} at {at:g}", (*GROWS, Event(at, kind, 0, 3)), Preparing.SUCCEEDS)
        for kind, what in (("operator_dies", "the operator dies"), ("kill_node", "a node is lost"))
        for at in (67, 69)
    ),
)


MEMORY_SCHEDULES: dict[str, Schedule] = {
    **{
        f"workers keep their state in memory: {what}": scripted_job(*events, make=Make.KEEPING, **more)
        for what, events, more in IN_MEMORY
    },
    **{
        f"workers keep shards of the state in memory: {what}": scripted_job(*events, make=Make.SHARDING, **{"step": 2, **more})
        for what, events, more in IN_SHARDS
    },
    **{
        f"Spot: {what}": scripted_job(*events, make=make, low=1)
        for what, events, make in SPOT
    },
    **{
        f"workers start ahead of a growth: {what}": scripted_job(*events, make=Make.KEEPING, preparing=how, nodes=2)
        for what, events, how in PREPARED
    },
    **{
        f"workers start when the old ones have ended: {what}": scripted_job(
            *events, make=Make.KEEPING, preparing=how, nodes=2, ours={"recovery": "Process"}
        )
        for what, events, how in RENEWED
    },
    "workers of a spare start ahead, and a node is lost": scripted_job(
        Event(100, "kill_node", 0), make=Make.KEEPING, preparing=Preparing.SUCCEEDS, low=2, high=2, nodes=3,
        specs=[{"name": "workers", "replicas": 2, "maxReplicas": 2, "spares": 1}],
    ),
}  # fmt: skip
