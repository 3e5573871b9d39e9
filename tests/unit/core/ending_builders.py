"""Jobs with deadlines, and jobs at their end."""

from __future__ import annotations

from typing import Any

from tests.unit.core.builders import (
    NOW,
    Seen,
    job,
    observed,
    seconds,
    trains,
)

from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import Policy, Snapshot

ACCEPTED = NOW - seconds(100)


def snapshot(record: Record, wishes: Policy | None = None, *pods: Seen, **changes: Any) -> Snapshot:
    return observed(job(record, wishes, created_at=ACCEPTED, **changes), pods)


def ended(ago_s: float) -> Record:
    return trains(outcome="Completed", outcome_reason="Completed", ended_at=NOW - seconds(ago_s))
