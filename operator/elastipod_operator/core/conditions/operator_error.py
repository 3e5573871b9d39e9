"""A pass over a job that failed by a mistake of the operator, as one of the job's conditions."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from ..reasons import Reason
from ..snapshot import Condition

OPERATOR_ERROR = Reason.OPERATOR_ERROR


def with_operator_error(conditions: tuple[Condition, ...], text: str, now: datetime) -> tuple[Condition, ...] | None:
    """Add it to what was told before, whose last condition stays the state; None when it is told already."""
    if any(text in c.message for c in conditions if c.type == "Warning"):
        return None
    before = next((c for c in conditions if c.type == "Warning"), None)
    if before is not None:
        # What it said before still holds; of two failures only the newest is told.
        kept = "" if before.reason == OPERATOR_ERROR else f"; {before.message}"
        told = replace(before, reason=OPERATOR_ERROR, message=f"{text}{kept}")
        return tuple(told if c is before else c for c in conditions)
    state = conditions[-1:] or (Condition("Created", True, Reason.ACCEPTED, "the job was accepted", now),)
    return (*conditions[:-1], Condition("Warning", False, OPERATOR_ERROR, text, now), *state)
