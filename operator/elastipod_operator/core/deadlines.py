"""Deadlines of a job. Time in suspension does not count."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from .grant import Grant
from .reasons import Reason
from .record import Record, TransitionKind
from .snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Deadline:
    """at: when the job fails. reason, message: which limit of the spec was exceeded."""

    at: datetime
    reason: Reason
    message: str


def accepted(snapshot: Snapshot, record: Record) -> datetime:
    """Give when an operator accepted the job, by the operator's clock."""
    return record.accepted_at or snapshot.job.created_at


def deadlines(snapshot: Snapshot, record: Record, grant: Grant | None) -> list[Deadline]:
    """Give the deadlines that are in force now."""
    policy = snapshot.job.policy
    transition = record.transition
    is_suspended = transition is not None and transition.kind is TransitionKind.SUSPEND
    if policy is None or grant is None or grant.is_suspended or is_suspended:
        return []
    found: list[Deadline] = []
    accepted_at = accepted(snapshot, record) + record.suspended_time
    if policy.active_deadline is not None:
        text = f"the job ran for longer than spec.runPolicy.activeDeadlineSeconds ({_seconds(policy.active_deadline.total_seconds())})"
        found.append(Deadline(accepted_at + policy.active_deadline, Reason.DEADLINE_EXCEEDED, text))
    if policy.startup_deadline is not None and record.started_at is None and record.first_pod_at is not None:
        text = f"training did not begin within spec.runPolicy.startupDeadlineSeconds ({_seconds(policy.startup_deadline.total_seconds())})"
        found.append(Deadline(record.first_pod_at + policy.startup_deadline, Reason.STARTUP_DEADLINE_EXCEEDED, text))
    recovering = transition is not None and transition.kind is TransitionKind.RECOVERY
    if (
        policy.fault_deadline is not None
        and record.fault_at is not None
        and (recovering or record.running_since is None)
    ):
        limit = _seconds(policy.fault_deadline.total_seconds())
        text = f"training did not resume within spec.runPolicy.faultDeadlineSeconds ({limit}) after a fault"
        found.append(Deadline(record.fault_at + policy.fault_deadline, Reason.FAULT_DEADLINE_EXCEEDED, text))
    return found


def overdue(snapshot: Snapshot, record: Record, grant: Grant | None) -> Deadline | None:
    """Give a deadline that has passed, the earliest first."""
    passed = [d for d in deadlines(snapshot, record, grant) if d.at <= snapshot.now]
    return min(passed, key=lambda d: d.at) if passed else None


def next_deadline(snapshot: Snapshot, record: Record, grant: Grant | None) -> datetime | None:
    """Give the time of the next deadline."""
    return min((d.at for d in deadlines(snapshot, record, grant) if d.at > snapshot.now), default=None)


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s"
