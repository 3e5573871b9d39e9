"""What the conditions share: a condition before its time is known, and parts of sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from ..reasons import AnyReason
from ..replica import Replica
from ..snapshot import NOT_CONSIDERED


@dataclass(frozen=True, slots=True)
class ConditionDraft:
    """A condition before its time is known."""

    type: str
    status: bool
    reason: AnyReason
    message: str
    parts: tuple[tuple[AnyReason, str], ...] = ()
    """Reason and message of each of several warnings that one condition reports."""


def first_problem(replicas: Iterable[Replica]) -> str:
    """Give the first problem of these pods, as the end of a sentence. Every new pod waits for a scheduler briefly: that is no problem."""
    problems = (r.pod.problem for r in replicas if r.pod.problem and r.pod.problem_reason != NOT_CONSIDERED)
    return next((f": {problem}" for problem in problems), "")


def time_of_day(at: datetime) -> str:
    return f"{at.astimezone(UTC):%H:%M:%S} UTC"
