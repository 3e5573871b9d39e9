"""What the conditions of a job share: a condition before its time is known, and parts of sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from ..health import Replica
from ..reasons import AnyReason
from ..snapshot import NOT_CONSIDERED


@dataclass(frozen=True, slots=True)
class ConditionDraft:
    """A condition before its time is known."""

    type: str
    status: bool
    reason: AnyReason
    message: str
    parts: tuple[tuple[AnyReason, str], ...] = ()
    """Of several things that are told together: reason and sentence of each."""


def first_problem(replicas: Iterable[Replica]) -> str:
    """Give what keeps one of them, as the end of a sentence. What every new pod is in for a moment is no trouble yet."""
    problems = (r.pod.problem for r in replicas if r.pod.problem and r.pod.problem_reason != NOT_CONSIDERED)
    return next((f": {problem}" for problem in problems), "")


def time_of_day(at: datetime) -> str:
    return f"{at.astimezone(UTC):%H:%M:%S} UTC"
