"""The user guide's loops train the same on several ranks as on one, also where a batch has fewer samples than ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.rank_worlds import Cases


@pytest.fixture(scope="module")
def cases() -> Iterator[Cases]:
    running = Cases("tests.e2e.guide_cases")
    yield running
    running.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "loop",
        "loader",
        "stateful",
        pytest.param("summed", marks=pytest.mark.long("variants")),
        pytest.param("padded", marks=pytest.mark.long("variants")),
        "padded and summed",
    ],
)
def test_a_loop_of_the_guide_gives_the_gradient_of_one_process_on_four_ranks(
    cases: Cases, tmp_path: Path, name: str
) -> None:
    if name == "stateful":
        pytest.importorskip("torchdata.stateful_dataloader", reason="the extra elastipod[data] is not installed")
    ((first, tail),) = cases.run("loop", tmp_path / "one", name, 1)
    of_ranks = cases.run("loop", tmp_path / "four", name, 4)
    assert len(of_ranks) == 4
    for rank, steps in enumerate(of_ranks):
        for of_four, of_one in zip(steps, (first, tail), strict=True):
            assert of_four["loss"] == pytest.approx(of_one["loss"], rel=1e-9), f"the loss on rank {rank}"
            assert of_four["gradient"] == pytest.approx(of_one["gradient"], rel=1e-9), f"the gradient on rank {rank}"
