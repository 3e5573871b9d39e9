"""The phases of one rank in memory, the moves between them, and how long each may last (docs/design/in-memory.md)."""

from __future__ import annotations

from datetime import timedelta

from elastipod.errors import ElastipodError
from elastipod.string_enum import StringEnum


class IllegalMove(ElastipodError):
    """A phase was left for one that does not follow it; a defect of the library, never of the script."""


class Phase(StringEnum):
    """What a rank is doing. A rank is in exactly one phase of exactly one generation."""

    # Runs the script's step, up to the point where its gradients are reduced.
    TRAINING = "training"
    # Holds the good, reduced gradients of its next step, and waits until every rank does.
    PREPARED = "prepared"
    # Has stopped between two operations: no collective of its generation will be begun any more.
    QUIESCED = "quiesced"
    # Has destroyed its process groups and waits at the agent's barrier for the next generation.
    PARKED = "parked"
    # Knows its new rank, and builds the process groups of the new generation.
    CONNECTING = "connecting"
    # Exchanges offers, from which every rank computes the step to resume at.
    AGREEING = "agreeing"
    # Completes its step if it has to, and receives what it lacks.
    FILLING = "filling"
    # Compares digests with the ranks that hold the same parts; when all agree, training goes on.
    VERIFYING = "verifying"


P = Phase

MOVES: dict[Phase, frozenset[Phase]] = {
    P.TRAINING: frozenset({P.PREPARED, P.QUIESCED}),
    P.PREPARED: frozenset({P.TRAINING, P.QUIESCED}),
    P.QUIESCED: frozenset({P.PARKED}),
    P.PARKED: frozenset({P.CONNECTING}),
    P.CONNECTING: frozenset({P.AGREEING, P.QUIESCED}),
    P.AGREEING: frozenset({P.FILLING, P.QUIESCED}),
    P.FILLING: frozenset({P.VERIFYING, P.QUIESCED}),
    P.VERIFYING: frozenset({P.TRAINING, P.QUIESCED}),
}

# After this long in a phase the process ends itself, and its agent starts another: the next deeper kind of restart.
LIMITS: dict[Phase, timedelta | None] = {
    P.TRAINING: None,  # the hang watch's limit, which is the user's
    P.PREPARED: None,  # the same: it waits for ranks that compute
    P.QUIESCED: timedelta(seconds=5),  # groups that cannot be aborted so soon hang in a driver
    P.PARKED: None,  # the operator's: how long it waits for replicas
    P.CONNECTING: timedelta(seconds=15),  # longer than its tries: after them a rank goes back to the barrier
    P.AGREEING: timedelta(seconds=10),
    P.FILLING: timedelta(seconds=60),  # without progress: a transfer that goes on may take longer
    P.VERIFYING: timedelta(seconds=30),
}


def move(phase: Phase, to: Phase) -> Phase:
    """Give the new phase. Raises IllegalMove, naming both, where the table has no such move."""
    if to not in MOVES[phase]:
        raise IllegalMove(
            f"a rank cannot go from {phase} to {to}; from there it goes to {', '.join(sorted(MOVES[phase]))}"
        )
    return to
