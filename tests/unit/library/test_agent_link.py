"""What a rank in memory learns from its agent."""

from __future__ import annotations

import pytest

from elastipod.in_memory.agent_link import stays_in_memory


@pytest.mark.parametrize(
    ("leaves", "kept", "stays"),
    [
        pytest.param(False, True, True, id="the pod stays with its processes"),
        pytest.param(None, True, True, id="processes are kept, and some of the pods stay"),
        pytest.param(True, True, False, id="the pod goes, although its processes live until then"),
        pytest.param(False, False, False, id="the pod stays, but its processes end"),
        pytest.param(None, False, False, id="processes end"),
        pytest.param(False, None, True, id="an operator that says only that the pod stays"),
        pytest.param(None, None, False, id="an operator that says nothing"),
    ],
)
def test_a_checkpoint_is_left_out_only_where_the_state_is_known_to_stay(
    leaves: bool | None, kept: bool | None, stays: bool
) -> None:
    assert stays_in_memory(leaves=leaves, kept=kept) is stays
