"""Random schedules of faults and wishes: whatever happens, the invariants hold and the job gets where it should."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import pytest
from tests.long_runs import LongRun
from tests.sim.scripted import STORIES
from tests.sim.story import Play, Story, draw, explain, failure_of

LONG_RUN_S = 240.0
MAX_STORIES = 3


def _tell_failures(seeds: Iterable[int]) -> None:
    stories: list[str] = []
    for seed in seeds:
        story = draw(seed)
        if failure_of(story) is not None:
            stories.append(
                explain(story) + f"\n\nplay it again: python -m pytest tests/sim -k every_schedule --sim-seed {seed}"
            )
            if len(stories) == MAX_STORIES:
                break
    if stories:
        pytest.fail("\n\n----\n\n".join(stories), pytrace=False)


def test_every_schedule_keeps_the_invariants_and_ends_well(seeds: range) -> None:
    _tell_failures(seeds)


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_a_told_story_ends_well(story: Story) -> None:
    if failure_of(story) is not None:
        pytest.fail(explain(story), pytrace=False)


@pytest.mark.long("sim")
@pytest.mark.timeout(LONG_RUN_S + 120)
def test_thousands_of_schedules_keep_the_invariants(seed: int, long_run: LongRun) -> None:
    until = time.monotonic() + LONG_RUN_S
    played = itertools.takewhile(lambda _: time.monotonic() < until, itertools.count(seed))
    count = 0
    for count, one in enumerate(played, 1):
        _tell_failures([one])
        long_run.count(schedules=count, last_seed=one)
    assert count


def test_the_same_seed_tells_the_same_story() -> None:
    first, second = (Play(draw(11)).run().log for _ in range(2))
    assert first == second
