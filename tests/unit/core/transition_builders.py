"""Snapshots and pods of a job in transition."""

from __future__ import annotations

from tests.unit.core.builders import (
    Seen,
    context,
    pod,
    ready,
)

from elastipod_operator.core.context import PlanDraft
from elastipod_operator.core.snapshot import ObservedAgent, Snapshot
from elastipod_operator.core.transition import in_transition

DRAINED = ready(1, drained=True)
GROWTH = "CapacityAvailable"


def step_of(snapshot: Snapshot) -> PlanDraft:
    """Give what the transition decides by itself, without what is told of it and when that changes."""
    assert snapshot.job.record is not None
    return in_transition(snapshot.job.record, context(snapshot))


def stopped(number: int, mine: ObservedAgent = DRAINED) -> list[Seen]:
    return [(pod(n), mine) for n in range(number)]
