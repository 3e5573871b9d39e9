"""What the storm over an operator counts as a loss."""

from __future__ import annotations

import pytest
from tests.e2e.host_view import Generation
from tests.e2e.operator_storm import losses


def generation(number: int, *steps: int, resumed: int) -> Generation:
    return Generation(number, resumed, 1, 0.0, 0.0, dict.fromkeys(steps, 0.0))


@pytest.mark.parametrize(
    ("kinds", "trained", "said"),
    [
        pytest.param({2: "resize"}, [generation(1, 1, 2, resumed=0), generation(2, 3, resumed=2)], [], id="none"),
        pytest.param(
            {2: "resize"},
            [generation(1, 1, 2, resumed=0), generation(2, 2, resumed=1)],
            ["generation 2 began after step 1, 1 had made 2"],
            id="a planned resize",
        ),
        pytest.param({2: "recovery"}, [generation(1, 1, 2, resumed=0), generation(2, resumed=0)], [], id="a crash"),
        pytest.param(
            {2: "recovery", 3: "resize"},
            [generation(1, 1, 2, resumed=0), generation(3, 1, resumed=0)],
            [],
            id="a crash, and a resize before anybody trained",
        ),
        pytest.param(
            {2: "resize", 3: "resize"},
            [generation(1, 1, 2, resumed=0), generation(3, 2, resumed=1)],
            ["generation 3 began after step 1, 1 had made 2"],
            id="two resizes, and nobody trained in between",
        ),
        pytest.param(
            {2: "resize", 3: "resize"},
            [generation(1, 1, resumed=0), generation(2, resumed=1), generation(3, resumed=0)],
            ["generation 3 began after step 0, 2 had made 1"],
            id="a generation without a step",
        ),
    ],
)
def test_what_a_planned_resize_lost(kinds: dict[int, str], trained: list[Generation], said: list[str]) -> None:
    assert losses(trained, {number: {"kind": kind} for number, kind in kinds.items()}) == said
