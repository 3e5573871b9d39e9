"""What the conditions share: a condition before its time is known, and parts of sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from ..avoided_nodes import nodes_to_avoid
from ..context import Context
from ..reasons import AnyReason
from ..record import Record
from ..replica import Replica
from ..snapshot import NOT_CONSIDERED
from ..wording import counted

# So many avoided nodes are named in a sentence.
NAMED = 3


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


def avoidance(record: Record, context: Context) -> str:
    """Say which nodes new pods avoid, and why or until when, as a part of a sentence; empty if every pod has a node or none is avoided."""
    nodes = nodes_to_avoid(record, context)
    if not nodes or all(r.pod.node for r in context.replicas.newest.values() if r.may_train):
        return ""
    period, closed = context.policy.eval_period, context.snapshot.closed_nodes
    faults = {o.node: f"{counted(o.times, 'fault')}, until {time_of_day(o.at + period)}" for o in record.node_faults}
    told = "; ".join(f"{node}: {closed.get(node) or faults[node]}" for node in nodes[:NAMED])
    more = f"; and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
    return f" (new pods avoid {told}{more})"


def time_of_day(at: datetime) -> str:
    return f"{at.astimezone(UTC):%H:%M:%S} UTC"
