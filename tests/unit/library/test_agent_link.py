"""What a rank in memory learns from its agent."""

from __future__ import annotations

import pytest

from elastipod.in_memory.agent_link import Fate, fate_after_stop


@pytest.mark.parametrize(
    ("leaves", "kept", "fate"),
    [
        pytest.param(False, True, Fate.STAYS, id="the pod stays with its processes"),
        pytest.param(None, True, Fate.KEPT, id="processes are kept, and some of the pods stay"),
        pytest.param(True, True, Fate.LEAVES, id="the pod goes, although its processes live until then"),
        pytest.param(False, False, Fate.UNKNOWN, id="the pod stays, but its processes end"),
        pytest.param(None, False, Fate.UNKNOWN, id="processes end"),
        pytest.param(False, None, Fate.STAYS, id="an operator that says only that the pod stays"),
        pytest.param(None, None, Fate.UNKNOWN, id="an operator that says nothing"),
    ],
)
def test_a_rank_knows_what_becomes_of_its_state(leaves: bool | None, kept: bool | None, fate: Fate) -> None:
    assert fate_after_stop(leaves=leaves, kept=kept) is fate
