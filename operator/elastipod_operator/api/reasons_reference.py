"""Write the reference of reasons from `core.reasons` and `core.depth_reasons`."""

from __future__ import annotations

from collections.abc import Iterable

from elastipod_operator.core.depth_reasons import DepthReason
from elastipod_operator.core.reasons import EventRule, Reason

_HEAD = """<!-- Generated from operator/elastipod_operator/core/reasons.py by `make generate`; edits are lost. -->
# Reasons

Every reason that the operator gives in conditions, Events and the history of a job. `kubectl describe hpjob NAME` shows
conditions and Events with their messages, `elastipod timeline NAME` the history.

Two kinds of reasons are not listed, because others choose them: those of Kueue, when it evicts or preempts a Workload, and
those of an agent, when workers fail ([agent](../agent.md)), such as `LogHang_<rule>` of a log rule.
"""
_DEPTHS = """
## Depths

Why a resize or recovery went as deep as it did: label `reason` of the metric `elastipod_changes_total`, and `depthCode` of
`elastipod timeline NAME -o json`. Events, the history and the timeline have it as a sentence, unless there is nothing to say.

| code | depth | meaning |
|---|---|---|
"""
_TABLE = "| reason | condition | severity | Event | meaning | what to do |\n|---|---|---|---|---|---|\n"


def render(reasons: Iterable[Reason] = Reason) -> str:
    """Give the reference as Markdown, in alphabetical order."""
    return f"{_HEAD}\n{_TABLE}{''.join(map(_row, sorted(reasons)))}{_DEPTHS}{''.join(map(_depth_row, DepthReason))}"


def _depth_row(reason: DepthReason) -> str:
    return f"| `{reason.value}` | {', '.join(reason.depths)} | {reason.meaning} |\n"


def _row(reason: Reason) -> str:
    event = "" if reason.event is EventRule.NEVER else reason.event.value
    cells = (f"`{reason.value}`", reason.where, reason.severity.value, event, reason.meaning, reason.advice)
    return f"| {' | '.join(cells)} |\n"
