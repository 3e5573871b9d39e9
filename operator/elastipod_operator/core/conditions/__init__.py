"""The conditions of a job. Each has a file that decides when it holds, with which reason and message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..actions import JobEvent, JobSize
from ..context import Context
from ..grant import Grant
from ..quota import Quota
from ..reasons import AnyReason, Reason, as_reason, writes_event_when_reported
from ..record import Record
from ..replica import Replicas
from ..snapshot import Condition, Snapshot
from ..status_fields import job_size, status_fields
from ..time_order import earliest
from ..wording import training
from . import pods_ready, scaling, state, warning
from .draft import ConditionDraft

__all__ = ["MAX_TEXT", "StatusReport", "describe"]

# Longer messages are cut; Kubernetes limits those of its own conditions to 32,768 characters.
MAX_TEXT = 8192


# Their status never changes while a job runs: what is new about them is the reason, so their time is that of the reason.
TOLD_BY_REASON = ("PodsReady", "Warning", "Scaling")

# Beside the state, in the order of status.conditions. Each gives its condition (None when it does not apply) and when to check again.
AUXILIARY: tuple[Callable[[Record, Context], tuple[ConditionDraft | None, datetime | None]], ...] = (
    pods_ready.describe,
    warning.describe,
    scaling.describe,
)


@dataclass(frozen=True, slots=True)
class StatusReport:
    """conditions: oldest first, the present state last. events: those for reasons that are new."""

    conditions: tuple[Condition, ...]
    size: JobSize
    status: dict[str, Any]
    events: tuple[JobEvent, ...] = ()
    wake_at: datetime | None = None


def describe(
    snapshot: Snapshot, record: Record, replicas: Replicas, grant: Grant | None, quota: Quota | None = None
) -> StatusReport:
    """Describe the job. Unchanged conditions keep their times; Events are given only for new reasons."""
    lines, wake = _drafts(snapshot, record, replicas, grant, quota)
    lines = warning.with_operator_warnings(lines, snapshot, replicas, record)
    old = {condition.type: condition for condition in snapshot.job.conditions}
    conditions = tuple(_dated(line, old, snapshot.now) for line in lines)
    events = tuple(
        JobEvent(reason, message)
        for line in lines
        if line.type in ("PodsReady", "Warning", "Suspended")
        for reason, message in line.parts or ((line.reason, line.message),)
        if writes_event_when_reported(reason)
        and not _is_reported(old.get(line.type), reason, message if line.parts else "")
    )
    return StatusReport(
        conditions,
        job_size(snapshot, record, replicas, grant),
        status_fields(snapshot, record, replicas, grant),
        events,
        wake,
    )


def _is_reported(before: Condition | None, reason: AnyReason, message: str) -> bool:
    """Whether the condition has this reason already. message: of one of several warnings; "" where the reason is enough."""
    return before is not None and (before.reason == reason or (bool(message) and message in before.message))


def _dated(line: ConditionDraft, old: dict[str, Condition], now: datetime) -> Condition:
    """Give a condition with its time. A message that quotes a very long text of the user is cut."""
    before = old.get(line.type)
    is_same = before is not None and before.status == line.status
    if line.type in TOLD_BY_REASON:
        is_same = is_same and before is not None and before.reason == line.reason
    since = before.since if before is not None and is_same else now
    message = line.message if len(line.message) <= MAX_TEXT else f"{line.message[:MAX_TEXT]} ..."
    return Condition(line.type, line.status, line.reason, message, since)


def _drafts(
    snapshot: Snapshot, record: Record, replicas: Replicas, grant: Grant | None, quota: Quota | None
) -> tuple[list[ConditionDraft], datetime | None]:
    created = ConditionDraft("Created", True, Reason.ACCEPTED, "the job was accepted")
    if record.outcome:
        ended = ConditionDraft(record.outcome, True, record.outcome_reason, record.outcome_message)
        return [created, ConditionDraft("Running", False, as_reason(record.outcome), "the job has ended"), ended], None
    if snapshot.job.unmanaged:
        return _unmanaged(snapshot, created), None
    if snapshot.job.policy is None or grant is None:
        return _invalid_spec(created, record, snapshot.job.spec_error), None
    context = Context(snapshot, snapshot.job.policy, replicas, grant, quota)
    auxiliary = [condition(record, context) for condition in AUXILIARY]
    now, wake = state.describe(record, context)
    before = [created] if now.type != "Created" else []
    if now.type in ("Running", "Faulted"):
        before.append(ConditionDraft("PodsRunning", True, Reason.PODS_RUNNING, "the first pods run"))
    if now.type != "Running" and any(c.type == "Running" for c in snapshot.job.conditions):
        before.append(ConditionDraft("Running", False, now.reason, now.message))
    drafts = [draft for draft, _ in auxiliary if draft is not None]
    return [*before, *drafts, now], earliest(wake, *(at for _, at in auxiliary))


def _unmanaged(snapshot: Snapshot, created: ConditionDraft) -> list[ConditionDraft]:
    """Say why nothing is done, and keep the state that the newer operator reported."""
    why = ConditionDraft("Warning", False, Reason.RECORD_OF_NEWER_OPERATOR, snapshot.job.unmanaged)
    last = snapshot.job.conditions[-1] if snapshot.job.conditions else None
    if last is None or last.type in ("Created", "Warning"):
        return [why, created]
    return [created, why, ConditionDraft(last.type, last.status, last.reason, last.message)]


def _invalid_spec(created: ConditionDraft, record: Record, spec_error: str) -> list[ConditionDraft]:
    """Report an invalid spec. A job that trains continues, but is not managed until the spec is valid."""
    if not record.members or record.transition is not None:
        return [created, ConditionDraft("Suspended", True, Reason.INVALID_SPEC, spec_error)]
    text = training(len(record.members), record.generation)
    return [
        created,
        ConditionDraft("Warning", False, Reason.INVALID_SPEC, spec_error),
        ConditionDraft("Running", True, Reason.TRAINING, text),
    ]
