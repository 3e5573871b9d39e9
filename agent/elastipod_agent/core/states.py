"""The agent's states and the moves between them."""

from __future__ import annotations

from enum import Enum


class IllegalTransition(AssertionError):
    """The agent asked for a move that its table does not name: a mistake of ours, never of a caller."""


class AgentState(str, Enum):
    """Where the agent is. The value is what goes over the wire in `status`; the name is the key in `transitions`."""

    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAULTED = "faulted"
    STOPPING = "stopping"
    SHUTDOWN = "shutdown"

    def __str__(self) -> str:
        return self.value


S = AgentState

# STOPPING -> FAULTED is ours: processes that not even SIGKILL ends (stuck in the kernel) leave no READY pod behind.
NEXT: dict[AgentState, frozenset[AgentState]] = {
    S.INIT: frozenset({S.READY, S.SHUTDOWN}),
    S.READY: frozenset({S.RUNNING, S.SHUTDOWN}),
    S.RUNNING: frozenset({S.COMPLETED, S.FAULTED, S.STOPPING, S.SHUTDOWN}),
    S.STOPPING: frozenset({S.READY, S.FAULTED, S.SHUTDOWN}),
    S.FAULTED: frozenset({S.STOPPING, S.SHUTDOWN}),
    S.COMPLETED: frozenset({S.STOPPING, S.SHUTDOWN}),
    S.SHUTDOWN: frozenset(),
}


def move(state: AgentState, to: AgentState) -> AgentState:
    """Give ``to`` when the table allows it. Raises IllegalTransition, naming what would be allowed, when not."""
    if to not in NEXT[state]:
        allowed = ", ".join(sorted(NEXT[state])) or "nothing"
        raise IllegalTransition(f"the agent cannot go from {state} to {to}; allowed: {allowed}")
    return to
