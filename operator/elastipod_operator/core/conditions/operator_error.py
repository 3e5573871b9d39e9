"""Report a reconcile pass that failed because of an error in the operator."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ..reasons import Reason
from ..snapshot import Condition

OPERATOR_ERROR = Reason.OPERATOR_ERROR


def with_operator_error(conditions: tuple[Condition, ...], text: str, now: datetime) -> tuple[Condition, ...] | None:
    """Add the error to the conditions, of which the last stays the state; None when they report it already."""
    if any(text in c.message for c in conditions if c.type == "Warning"):
        return None
    before = next((c for c in conditions if c.type == "Warning"), None)
    if before is not None:
        # Other warnings still hold; of two errors only the newest is reported.
        kept = "" if before.reason == OPERATOR_ERROR else f"; {before.message}"
        changed = replace(before, reason=OPERATOR_ERROR, message=f"{text}{kept}")
        return tuple(changed if c is before else c for c in conditions)
    state = conditions[-1:] or (Condition("Created", True, Reason.ACCEPTED, "the job was accepted", now),)
    return (*conditions[:-1], Condition("Warning", False, OPERATOR_ERROR, text, now), *state)
