"""Situations of a job, and what is reported in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.core.builders import (
    NOW,
    Seen,
    granted,
    pod,
    policy,
    running,
    seconds,
    trains,
    transition,
)

from elastipod_operator.core.actions import Plan
from elastipod_operator.core.conditions import StatusReport, describe
from elastipod_operator.core.health import assess
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import (
    Record,
    TransitionKind,
)
from elastipod_operator.core.snapshot import Condition, ObservedPod, Snapshot

Told = list[tuple[str, bool, str]]
RUN: list[Seen] = [(pod(0), running()), (pod(1), running())]
ACCEPTED = ("Created", True, "Accepted")
PODS_RUN = ("PodsRunning", True, "PodsRunning")
STARTS = Record(transition=transition(TransitionKind.START))
FULL = policy(2, 2)
ENDED = trains(outcome="Failed", outcome_reason="WorkerCrash", ended_at=NOW)


def report(snapshot: Snapshot) -> StatusReport:
    return describe(snapshot, snapshot.job.record or Record(), assess(snapshot), granted(snapshot))


def told(snapshot: Snapshot) -> Told:
    return [(c.type, c.status, c.reason) for c in report(snapshot).conditions]


def waits(ordinal: int, **changes: Any) -> Seen:
    return pod(ordinal, **{"phase": "Pending", "ip": "", "node": "", "started": False, **changes}), None


def scaling(reason: str) -> tuple[str, bool, str]:
    return "Scaling", False, reason


RECOVERS = trains(
    transition=transition(TransitionKind.RECOVERY, cause="WorkerCrash", is_budget_checked=True),
    fault_at=NOW - seconds(29.9),
)
BROKEN = replace(RECOVERS, fault_at=NOW, consecutive_failures=2)


def sentence(snapshot: Snapshot, kind: str) -> str:
    return next(c.message for c in report(snapshot).conditions if c.type == kind)


UNSCHEDULABLE = "0/4 nodes are available: 4 Insufficient cpu"


def unschedulable(ordinal: int, **changes: object) -> tuple[ObservedPod, None]:
    pending: dict[str, object] = {"phase": "Pending", "ip": "", "node": "", "started": False, "problem": UNSCHEDULABLE,
               "problem_reason": Reason.UNSCHEDULABLE}  # fmt: skip
    return pod(ordinal, **{**pending, **changes}), None


def state(todo: Plan) -> tuple[str, bool, str]:
    last = todo.conditions[-1]
    return last.type, last.status, last.reason


def condition(todo: Plan, kind: str) -> Condition:
    return next(c for c in todo.conditions if c.type == kind)


STARTING = Record(transition=transition(TransitionKind.START))
RESIZING = trains(transition=transition())
