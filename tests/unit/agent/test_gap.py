"""The gap in training between two generations, from what workers report."""

from __future__ import annotations

import asyncio

import pytest

from elastipod.worker_file import Progress
from elastipod_agent.generation.gap import measure_gap


def report(at: float, step: int = 8) -> Progress:
    return Progress(step=step, samples=8, loss=None, samples_per_s=None, world_size=1, time=at)


@pytest.mark.parametrize(
    ("before", "found"),
    [
        pytest.param(report(100.0, step=7), [(2.5, 0)], id="the next step"),
        pytest.param(report(100.0, step=20), [(2.5, 13)], id="behind the last step"),
        pytest.param(report(100.0, step=8), [(2.5, 1)], id="the same step once more"),
        pytest.param(report(100.0, step=3), [(2.5, 0)], id="steps that were made elsewhere"),
        pytest.param(None, [], id="no step before it"),
        pytest.param(report(200.0, step=7), [(0.0, 0)], id="the clock was set back"),
    ],
)
async def test_the_gap_ends_with_the_first_step(before: Progress | None, found: list[tuple[float, int]]) -> None:
    reports = iter([None, None, report(102.5), report(103.0, step=9)])
    given: list[tuple[float, int]] = []
    await measure_gap(lambda: next(reports), before, lambda gap_s, repeated: given.append((gap_s, repeated)))
    assert given == found


async def test_a_generation_without_a_step_has_none() -> None:
    given: list[tuple[float, int]] = []
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(measure_gap(lambda: None, report(100.0), lambda *found: given.append(found)), 0.1)
    assert given == []
