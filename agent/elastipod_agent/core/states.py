"""The agent's states and the transitions between them."""

from __future__ import annotations

from elastipod.string_enum import StringEnum


class IllegalTransition(AssertionError):
    """A transition that the table does not allow: an error of the agent, never of a caller."""


class AgentState(StringEnum):
    """A state of the agent. Its value is sent as `status`; its name is the key in `transitions`."""

    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAULTED = "faulted"
    STOPPING = "stopping"
    SHUTDOWN = "shutdown"


S = AgentState

# STOPPING -> FAULTED is an addition to HyperPod's table: a pod with processes that survive SIGKILL must not become READY.
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
    """Give ``to`` if the table allows the transition. Raises IllegalTransition, which names the allowed ones."""
    if to not in NEXT[state]:
        allowed = ", ".join(sorted(NEXT[state])) or "nothing"
        raise IllegalTransition(f"the agent cannot go from {state} to {to}; allowed: {allowed}")
    return to
