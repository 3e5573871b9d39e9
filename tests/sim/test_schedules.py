"""Random schedules of faults and wishes: whatever happens, the invariants hold and the job gets where it should."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.long_runs import LongRun
from tests.sim.conftest import DEFAULT_SCHEDULES, SEEDS_OF_A_TEST, all_seeds
from tests.sim.events import Event
from tests.sim.faults import FAULTS
from tests.sim.queue_faults import QUEUE_FAULTS
from tests.sim.random_schedules import Story, draw
from tests.sim.required_coverage import MUST_MEET
from tests.sim.scripted_queue_schedules import QUEUE_STORIES, QUEUE_TURNS
from tests.sim.scripted_schedules import STORIES, TURNS
from tests.sim.simulation import Play, explain, failure_of

LONG_RUN_S = 240.0
MAX_STORIES = 3
# The shortest turn has a record, four pods that go, and the status.
LEAST_CALLS = 8
ALL_FAULTS = FAULTS | QUEUE_FAULTS
ALL_STORIES = STORIES | QUEUE_STORIES
ALL_TURNS = TURNS | QUEUE_TURNS


def _play_all(seeds: Iterable[int]) -> Counter[str]:
    """Play the schedules; gives what was met in them. Fails with the stories of those that failed."""
    stories: list[str] = []
    met: Counter[str] = Counter()
    for seed in seeds:
        story = draw(seed)
        if failure_of(story, met) is not None:
            stories.append(f"{explain(story)}\n\nplay it again: make sim SEED={seed}")
            if len(stories) == MAX_STORIES:
                break
    if stories:
        pytest.fail("\n\n----\n\n".join(stories), pytrace=False)
    return met


def test_every_schedule_keeps_the_invariants_and_ends_well(
    seeds: range, shared_folder: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    met = _play_all(seeds)
    if len(seeds) == 1:
        with capsys.disabled():
            print("\n" + Play(draw(seeds[0])).run().told())
    num_schedules = len(all_seeds(pytestconfig))
    if num_schedules >= DEFAULT_SCHEDULES:
        everything = _met_in_all_parts(shared_folder, seeds, met, math.ceil(num_schedules / SEEDS_OF_A_TEST))
        assert everything is None or not _missed(everything), "what never really happened proves nothing"


def _met_in_all_parts(folder: Path, seeds: range, met: Counter[str], num_parts: int) -> Counter[str] | None:
    """Note what was met in one part. Gives what was met in all of them, to the part that ends last; None to the others."""
    draft = folder / f"{seeds[0]}.draft"
    draft.write_text(json.dumps(met))
    draft.rename(folder / f"{seeds[0]}.json")
    parts = list(folder.glob("*.json"))
    if len(parts) < num_parts:
        return None
    return sum((Counter(json.loads(part.read_text())) for part in parts), Counter())


def _missed(met: Counter[str]) -> set[str]:
    """Give what was not met; told stories see to what chance leaves out."""
    names = (*ALL_FAULTS, *MUST_MEET)
    for story in ALL_STORIES.values():
        if all(met[name] for name in names):
            break
        failure_of(story, met)
    return {name for name in names if not met[name]}


@pytest.mark.parametrize("story", ALL_STORIES.values(), ids=ALL_STORIES)
def test_a_told_story_ends_well(story: Story) -> None:
    if failure_of(story) is not None:
        pytest.fail(explain(story), pytrace=False)


@pytest.mark.parametrize("turn", ALL_TURNS)
def test_the_operator_may_die_between_any_two_calls(turn: str) -> None:
    """Before the first call of what the story is about, after it, after the second one, and so on to the last."""
    begin, end, story = ALL_TURNS[turn]
    called = sum(begin <= at < end for at in Play(story).run().cluster.called_at)
    assert called >= LEAST_CALLS, "the turn is somewhere else in the story"
    for calls in range(called):
        events = sorted((*story.events, Event(begin, "operator_dies_after", calls, 2.0)), key=lambda e: e.at)
        dies = replace(story, events=tuple(events))
        met: Counter[str] = Counter()
        if failure_of(dies, met) is not None:
            pytest.fail(f"dead after {calls} calls\n" + explain(dies), pytrace=False)
        assert met["the operator dies before a call"]


@pytest.mark.long("sim")
def test_thousands_of_schedules_keep_the_invariants(seed: int, long_run: LongRun) -> None:
    until = time.monotonic() + LONG_RUN_S
    played = itertools.takewhile(lambda _: time.monotonic() < until, itertools.count(seed))
    count = 0
    met: Counter[str] = Counter()
    for count, one in enumerate(played, 1):
        met += _play_all([one])
        long_run.count(schedules=count, last_seed=one, faults=sum(met[name] for name in ALL_FAULTS))
    long_run.detail(met=dict(sorted(met.items())))
    assert count


def test_the_same_seed_tells_the_same_story() -> None:
    for queued in (False, True):
        first, second = (Play(draw(11, queued=queued)).run().log for _ in range(2))
        assert first == second
