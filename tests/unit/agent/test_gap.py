"""The gap in training between two generations, from what workers report."""

from __future__ import annotations

import asyncio

import pytest

from elastipod.worker_file import Progress
from elastipod_agent.generation.gap import measure_gap


def report(at: float) -> Progress:
    return Progress(step=8, samples=8, loss=None, samples_per_s=None, world_size=1, time=at)


@pytest.mark.parametrize(
    ("before", "gap_s"),
    [
        pytest.param(100.0, 2.5, id="between two steps"),
        pytest.param(None, None, id="no step before it"),
        pytest.param(200.0, 0.0, id="the clock was set back"),
    ],
)
async def test_the_gap_ends_with_the_first_step(before: float | None, gap_s: float | None) -> None:
    reports = iter([None, None, report(102.5), report(103.0)])
    found: list[float | None] = []
    await measure_gap(lambda: next(reports), before, found.append)
    assert found == [gap_s]


async def test_a_generation_without_a_step_has_none() -> None:
    found: list[float | None] = []
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(measure_gap(lambda: None, 100.0, found.append), 0.1)
    assert found == []
