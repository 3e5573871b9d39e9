"""Hand-made records of one run: what the operator, the workers and the demo would have written down."""

from __future__ import annotations

from typing import Any

from elastipod_local.demo.report import KILL_MARK, Mark, Run, parse_history
from elastipod_local.demo.run_log import generations
from elastipod_local.demo.urgent_job import UrgentRun
from elastipod_local.demo.watcher import JobEvent

CREATED_AT = 1_700_000_000.0
FORCED = "spec.elastipod.recovery is Process"
CREATED = "2023-11-14T22:13:20.000Z"


def rfc3339(seconds: float) -> str:
    """Give the moment this many seconds after the job's creation, as the operator writes it."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"2023-11-14T22:{13 + (20 + whole) // 60:02}:{(20 + whole) % 60:02}.{milliseconds:03}Z"


def entry(generation: int, before: int, size: int, kind: str, cause: str, at_s: float, **more: Any) -> dict[str, Any]:
    """Give one entry of the annotation elastipod.io/history; detected_s defaults to the decision."""
    detected_s = more.get("detected_s", at_s)
    depth = {"depth": "memory"} if kind != "start" else {}
    return {
        "generation": generation,
        "from": before,
        "to": size,
        "kind": kind,
        "cause": cause,
        "at": rfc3339(at_s),
        "detected_at": rfc3339(detected_s),
        "running_at": rfc3339(at_s + 1),
        **depth,
        **{name: more[name] for name in ("depth", "depth_reason", "depth_code") if name in more},
    }


def log(
    generation: int,
    rank: int,
    world_size: int,
    *,
    resumed_step: int = 0,
    steps: dict[int, float],
    drained_s: float | None = None,
    loss: float | None = 1.0,
) -> list[dict[str, Any]]:
    """Give one rank's sample log. steps: step -> seconds since creation at which it was made."""
    lines: list[dict[str, Any]] = [
        {
            "kind": "start",
            "generation": generation,
            "rank": rank,
            "world_size": world_size,
            "resumed_step": resumed_step,
            "resumed_generation": max(0, generation - 1),
            "dataset_size": 64,
            "epochs": 1,
            "global_batch": 8,
            "t": CREATED_AT,
        }
    ]
    for step, at_s in steps.items():
        lines.append({"kind": "step", "step": step, "epoch": 0, "ids": [[0, 8]], "t": CREATED_AT + at_s, "loss": loss})
    if drained_s is not None:
        lines.append({"kind": "end", "step": max(steps), "why": "drained", "t": CREATED_AT + drained_s})
    return lines


GROW_SHRINK_CRASH = [
    entry(1, 0, 2, "start", "GangReady", 3.0),
    entry(2, 2, 4, "resize", "CapacityAvailable", 10.0),
    entry(3, 4, 2, "resize", "NodeDrained", 20.0),
    entry(4, 2, 2, "recovery", "WorkerCrash", 30.05, detected_s=30.02),
]

GROW_SHRINK_CRASH_LOGS = [
    log(1, 0, 2, steps={1: 5.0, 2: 9.0, 3: 10.2}, drained_s=10.5, loss=3.0),
    log(1, 1, 2, steps={1: 5.1, 2: 9.0, 3: 10.1}, drained_s=10.4, loss=5.0),
    log(2, 0, 4, resumed_step=3, steps={4: 12.0, 5: 19.5, 6: 20.25}, drained_s=20.5),
    log(3, 0, 2, resumed_step=6, steps={7: 21.5, 8: 25.0, 9: 30.0}),
    log(4, 0, 2, resumed_step=8, steps={9: 31.0, 10: 40.0}, loss=0.5),
]

BOTH_ACTS = [
    *GROW_SHRINK_CRASH,
    entry(5, 2, 4, "resize", "CapacityAvailable", 45.0),
    entry(6, 4, 2, "resize", "Preempted", 60.2, detected_s=60.1),
    entry(7, 2, 4, "resize", "CapacityAvailable", 80.0),
    entry(
        8, 4, 2, "resize", "ScaledByUser", 95.0, depth="process", depth_reason=FORCED, depth_code="RecoveryIsProcess"
    ),
]
BOTH_ACTS_LOGS = [
    *GROW_SHRINK_CRASH_LOGS[:-1],
    log(4, 0, 2, resumed_step=8, steps={9: 31.0, 10: 45.2}, drained_s=45.5),
    log(5, 0, 4, resumed_step=10, steps={11: 47.0, 12: 59.8, 13: 60.4}, drained_s=60.5),
    log(6, 0, 2, resumed_step=13, steps={14: 61.5, 15: 66.0, 16: 70.0, 17: 74.5, 18: 80.2}, drained_s=80.4),
    log(7, 0, 4, resumed_step=18, steps={19: 82.0, 20: 90.0}, drained_s=95.5),
    log(8, 0, 2, resumed_step=20, steps={21: 97.5, 22: 99.0}),
]
URGENT = [entry(1, 0, 2, "start", "Admitted", 63.5)]
URGENT_LOGS = [log(1, 0, 2, steps={1: 64.5, 2: 68.0, 3: 76.0}, loss=4.0)]
URGENT_AT_S = 60.0
WORDS = "Preempted to accommodate a workload due to prioritization in the ClusterQueue"
EVICTED = JobEvent("Workload", "EvictedDueToPreempted", WORDS)
QUOTED = JobEvent("HyperPodPyTorchJob", "Draining", f"4 -> 2: Kueue evicts 2 replicas: {WORDS}")


def elastic_run(history: list[dict[str, Any]] = BOTH_ACTS, logs: list[list[dict[str, Any]]] = BOTH_ACTS_LOGS) -> Run:
    """Give the elastic job's run through both acts, or with other records."""
    return Run(CREATED_AT, parse_history(history), generations(logs), (Mark(KILL_MARK, CREATED_AT + 30.01),))


def urgent_run(
    history: list[dict[str, Any]] = URGENT, logs: list[list[dict[str, Any]]] = URGENT_LOGS, **more: Any
) -> UrgentRun:
    """Give the urgent job's stay as it should be, or with other records."""
    run = Run(CREATED_AT + URGENT_AT_S, parse_history(history), generations(logs), ())
    return UrgentRun(**{"job": "urgent", "run": run, "state": "Completed", "events": (QUOTED, EVICTED), **more})
