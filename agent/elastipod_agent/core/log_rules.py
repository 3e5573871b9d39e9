"""Log rules as the operator sends them (`log_monitoring_configuration`): validated and typed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastipod_agent.core.pattern_check import check_compile_time

OPERATORS = ("gt", "lt", "eq", "gteq", "lteq")
MAX_RULES = 64
_MAX_PATTERN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRule:
    """One rule: a pattern that worker lines are expected to match, and what its absence or its number means.

    The number is the first group of the pattern. Further groups, which HyperPod's own samples have, are ignored.
    """

    name: str
    log_pattern: str
    expected_start_cutoff_s: float | None = None
    expected_recurring_s: float | None = None
    stop_pattern: str | None = None
    metric_threshold: float | None = None
    operator: str | None = None
    metric_evaluation_points: int = 1
    fault_on_match: bool = False


def parse_log_rules(rules: object) -> tuple[LogRule, ...]:
    """Read a list of rules. Raises ValueError with one sentence that names the rule and the field."""
    if not isinstance(rules, list):
        raise ValueError("must be a list of rules or null")
    if len(rules) > MAX_RULES:
        raise ValueError(f"holds {len(rules)} rules; at most {MAX_RULES} are watched")
    return tuple(_rule(index, rule) for index, rule in enumerate(rules))


def _rule(index: int, rule: object) -> LogRule:
    if not isinstance(rule, Mapping):
        raise ValueError(f"rule {index} must be an object")
    name = rule.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError(f"rule {index}: name must be a non-empty string")
    where = f"rule {name!r}"
    operator = rule.get("operator")
    if operator is not None and operator not in OPERATORS:
        raise ValueError(f"{where}: operator is {operator!r}; it must be one of {', '.join(OPERATORS)}")
    points = _number(where, rule, "metricEvaluationDataPoints")
    pattern = _pattern(where, rule, "logPattern")
    if pattern is None:
        raise ValueError(f"{where}: logPattern must be a non-empty string")
    return LogRule(
        name=name,
        log_pattern=pattern,
        expected_start_cutoff_s=_number(where, rule, "expectedStartCutOffInSeconds"),
        expected_recurring_s=_number(where, rule, "expectedRecurringFrequencyInSeconds"),
        stop_pattern=_pattern(where, rule, "stopPattern"),
        metric_threshold=_number(where, rule, "metricThreshold", may_be_negative=True),
        operator=operator,
        metric_evaluation_points=1 if points is None else max(1, int(points)),
        fault_on_match=rule.get("faultOnMatch") is True,
    )


def _pattern(where: str, rule: Mapping[str, Any], field: str) -> str | None:
    text = rule.get(field)
    if text is None or text == "":
        return None
    if not isinstance(text, str) or len(text) > _MAX_PATTERN:
        raise ValueError(f"{where}: {field} must be a string of at most {_MAX_PATTERN} characters")
    try:
        check_compile_time(text)
        re.compile(text)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise ValueError(f"{where}: {field} is not a regular expression: {error}") from error
    return text


def _number(where: str, rule: Mapping[str, Any], field: str, *, may_be_negative: bool = False) -> float | None:
    value = rule.get(field)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{where}: {field} must be a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {field} must be a number")
    if value < 0 and not may_be_negative:
        raise ValueError(f"{where}: {field} is {value}; it must not be negative")
    return float(value)
