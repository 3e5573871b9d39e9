"""The table of states."""

from __future__ import annotations

import pytest
from tests.nonempty import every

from elastipod_agent.core.states import NEXT, AgentState, IllegalTransition, move


def test_the_table_names_every_state() -> None:
    assert set(NEXT) == set(AgentState)


def test_every_state_can_be_reached_and_every_one_can_leave() -> None:
    reached = {AgentState.INIT}
    while more := {to for state in reached for to in NEXT[state]} - reached:
        reached |= more
    assert reached == set(AgentState)
    assert every(AgentState.SHUTDOWN in NEXT[state] for state in AgentState if state is not AgentState.SHUTDOWN)


@pytest.mark.parametrize("state", list(AgentState))
@pytest.mark.parametrize("to", list(AgentState))
def test_a_move_is_made_or_refused_as_the_table_says(state: AgentState, to: AgentState) -> None:
    if to in NEXT[state]:
        assert move(state, to) is to
    else:
        with pytest.raises(IllegalTransition, match=f"from {state} to {to}"):
            move(state, to)


def test_states_go_over_the_wire_in_lower_case() -> None:
    assert {str(state) for state in AgentState} == {state.name.lower() for state in AgentState}
