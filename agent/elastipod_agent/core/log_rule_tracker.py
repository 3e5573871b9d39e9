"""The state of each log rule, from the lines that match it and from their absence. Reads no clock.

Times are seconds of a `SteadyClock`: a run begins at 0, and pauses of the agent itself do not count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastipod.string_enum import StringEnum
from elastipod_agent.core.log_rules import LogRule

MAX_LINE_SHOWN = 300
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    "gt": operator.gt,
    "lt": operator.lt,
    "eq": operator.eq,
    "gteq": operator.ge,
    "lteq": operator.le,
}
_WORDS = {"gt": "above", "lt": "below", "eq": "equal to", "gteq": "at or above", "lteq": "at or below"}


class RuleState(StringEnum):
    """The state of a rule. WAITING: no line has matched yet."""

    WAITING = "WAITING"
    HEALTHY = "HEALTHY"
    SLOW = "SLOW"
    HANGING = "HANGING"
    FAULTED = "FAULTED"


FAULT_REASONS = {RuleState.SLOW: "LogSlow", RuleState.HANGING: "LogHang", RuleState.FAULTED: "LogFault"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Matches:
    """Lines that matched one rule, in order. line: the last one. values: the captured numbers, if the rule compares numbers.

    is_over: the stop pattern matched after them.
    """

    count: int
    line: str = ""
    values: tuple[float, ...] = ()
    is_over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleTracker:
    """One rule and its state. Every method gives a new tracker; a rule in a fault state, or one that is over, does not change any more.

    base: the time from which silence counts. num_bad: numbers in a row beyond the threshold.
    """

    rule: LogRule
    state: RuleState = RuleState.WAITING
    base: float = 0.0
    num_bad: int = 0
    num_matches: int = 0
    last_line: str = ""
    last_value: float | None = None
    is_over: bool = False

    @property
    def is_watched(self) -> bool:
        """True while lines can still change the state."""
        return not self.is_over and self.state not in FAULT_REASONS

    @property
    def deadline(self) -> float | None:
        """When silence becomes a hang; None if it never does."""
        limit_s = self._limit_s
        return self.base + limit_s if self.is_watched and limit_s is not None else None

    @property
    def reason(self) -> str:
        """The reason of the fault, as /status shows it; "" if there is none."""
        return f"{FAULT_REASONS[self.state]}_{self.rule.name}" if self.state in FAULT_REASONS else ""

    def add_matches(self, now: float, matches: Matches) -> RuleTracker:
        """Add lines that matched."""
        if not self.is_watched:
            return self
        after = replace(self, is_over=matches.is_over)
        if matches.count:
            after = replace(
                after,
                state=RuleState.HEALTHY,
                base=now,
                num_matches=self.num_matches + matches.count,
                last_line=matches.line[:MAX_LINE_SHOWN],
            )
            if self.rule.fault_on_match:
                return replace(after, state=RuleState.FAULTED)
        return after._measured(matches.values)

    def check_silence(self, now: float) -> RuleTracker:
        """Check the silence up to this time; all lines until then must have been added."""
        deadline = self.deadline
        return self if deadline is None or now < deadline else replace(self, state=RuleState.HANGING)

    def restart_silence(self, now: float) -> RuleTracker:
        """Restart the silence, because a line that was dropped may have matched."""
        return replace(self, base=now) if self.is_watched else self

    def stop(self) -> RuleTracker:
        """Stop tracking."""
        return replace(self, is_over=True) if self.is_watched else self

    def message(self) -> str:
        """Say what was expected and what came instead."""
        rule = self.rule
        if self.state is RuleState.FAULTED:
            return f"log rule {rule.name}: a line that means a fault was printed: {self.last_line}"
        if self.state is RuleState.SLOW:
            points = f"{self.num_bad} times in a row" if self.num_bad > 1 else "once"
            limit = f"{_WORDS[rule.operator or 'eq']} {rule.metric_threshold:g}"
            return f"log rule {rule.name}: the number was {limit} {points}; the last is {self.last_value:g}: {self.last_line}"
        if not self.num_matches:
            return (
                f"log rule {rule.name}: no line matched {_shown(rule.log_pattern)} in the first {self._limit_s:g} s "
                "of the workers"
            )
        return (
            f"log rule {rule.name}: no further line matched {_shown(rule.log_pattern)} for {self._limit_s:g} s, "
            f"after {self.num_matches}; the last was: {self.last_line}"
        )

    @property
    def _limit_s(self) -> float | None:
        is_first = self.num_matches == 0
        return self.rule.expected_start_cutoff_s if is_first else self.rule.expected_recurring_s

    def _measured(self, values: Sequence[float]) -> RuleTracker:
        threshold, name = self.rule.metric_threshold, self.rule.operator
        if threshold is None or name is None:
            return self
        num_bad, last = self.num_bad, self.last_value
        for last in values:
            num_bad = num_bad + 1 if _HOLDS[name](last, threshold) else 0
            if num_bad >= self.rule.metric_evaluation_points:
                return replace(self, state=RuleState.SLOW, num_bad=num_bad, last_value=last)
        return replace(self, num_bad=num_bad, last_value=last)


def next_deadline(trackers: Sequence[RuleTracker]) -> float | None:
    """Give the earliest time at which silence becomes a hang."""
    return min((one.deadline for one in trackers if one.deadline is not None), default=None)


class SteadyClock:
    """A clock that runs only while the agent does: of an interval that is much too long, only the usual one counts.

    An agent that was stopped, or a pod that was frozen, therefore does not take its own pause for silence of the workers.
    """

    def __init__(self, begin: float, usual_step_s: float) -> None:
        self._last = begin
        self._usual_step_s = usual_step_s
        self._now = 0.0

    def at(self, real: float) -> float:
        """Give the time; must be called at least every usual interval. real: the time of a monotonic clock."""
        step = max(0.0, real - self._last)
        self._last = max(real, self._last)
        self._now += step if step <= 2 * self._usual_step_s else self._usual_step_s
        return self._now


def _shown(pattern: str, limit: int = 120) -> str:
    return pattern if len(pattern) <= limit else pattern[: limit - 3] + "..."
