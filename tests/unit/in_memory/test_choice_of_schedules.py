"""The schedules of `make test-long NAME=inmemory` are chosen by what was seen so far, so that each fault comes often enough."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.inmemory_schedules import (
    KINDS_AT,
    ONLY_STATE,
    draw,
    place_of,
    steps_between_copies,
    steps_given_up,
)
from tests.e2e.inmemory_verdicts import LEAST_OF_EACH, Schedule, Verdict, Verdicts
from tests.nonempty import some

from elastipod.audit.log_reader import LoggedGeneration, LogHeader
from elastipod.chaos import FOLLOWER, Moment, PlannedFault

NEVER = 5  # a place in KINDS_AT
FIRST = 20240611


def play(verdicts: Verdicts, total: int, *, share: float, never: int | None = None) -> list[Schedule]:
    """Two at a time, as the run does; a share of the faults happens. never: place of one that does not."""
    rng = random.Random(1)
    under_way: list[Schedule] = []
    given: list[Schedule] = []
    while len(given) < total:
        given.append(verdicts.next(under_way, FIRST))
        under_way.append(given[-1])
        if len(under_way) == 2:
            state, seed = under_way.pop(0)
            at, kind = KINDS_AT[place_of(seed)]
            happened = [f"{at} x {kind}"] * (place_of(seed) != never and rng.random() < share)
            verdicts.add(Verdict(state, seed, "commit", 1.0, is_ended=True, happened=happened))
    return given


def test_each_fault_comes_ten_times_in_seven_hundred_schedules_though_some_do_not_happen(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "verdicts.jsonl", goes_on=False)
    given = play(verdicts, 700, share=0.95)
    assert len(set(given)) == 700
    assert min(seed for _, seed in given) >= FIRST
    of_moment = {(KINDS_AT[place_of(seed)][0], state) for state, seed in given}
    for moment in Moment:
        states = {state for at, state in of_moment if at is moment}
        assert states == ({ONLY_STATE[moment]} if moment in ONLY_STATE else {"replicated", "sharded"})
    either = Counter(state for state, seed in given if KINDS_AT[place_of(seed)][0] not in ONLY_STATE)
    assert 3 * either["sharded"] == pytest.approx(either["replicated"], rel=0.2)
    assert not verdicts.rare(), verdicts.table()


def test_a_fault_that_never_happens_does_not_take_the_place_of_the_others(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "verdicts.jsonl", goes_on=False)
    given = play(verdicts, 780, share=0.95, never=NEVER)
    assert verdicts.rare() == [NEVER], verdicts.table()
    assert sum(place_of(seed) == NEVER for _, seed in given) <= 3 * (LEAST_OF_EACH + 2)


def faults_of(at: Moment, state: str) -> Iterator[tuple[Any, PlannedFault]]:
    for seed in range(10 * len(KINDS_AT)):
        if KINDS_AT[place_of(seed)][0] is at:
            schedule = draw(seed, state)
            yield (seed, schedule), schedule.faults[0]


def test_a_fault_in_a_hand_over_is_drawn_with_ranks_that_leave() -> None:
    ranks = set()
    for (_, schedule), fault in some(faults_of(Moment.HAND_OVER, "sharded")):
        (shrink,) = schedule.resizes
        assert schedule.size > shrink.size >= schedule.size / 2
        assert fault.rank is not None
        assert fault.rank < schedule.size
        ranks.add(fault.rank < shrink.size)
    assert ranks == {True, False}, "it comes to those who stay and to those who leave"


def test_a_fault_in_a_copy_is_drawn_for_a_step_that_is_copied_and_not_the_first() -> None:
    for (seed, _), fault in some(faults_of(Moment.COPY, "sharded")):
        every = steps_between_copies(seed)
        assert fault.step is not None
        assert fault.step % every == 0
        assert fault.step > every


def test_a_fault_in_following_is_drawn_with_newcomers_and_comes_before_they_join() -> None:
    ranks = set()
    for (_, schedule), fault in some(faults_of(Moment.FOLLOWING, "replicated")):
        (growth,) = schedule.resizes
        assert growth.size > schedule.size
        assert schedule.newcomers_follow
        assert fault.step is not None
        assert fault.step <= growth.after_step
        ranks.add(fault.rank)
    assert ranks == {FOLLOWER, 0}


@pytest.mark.parametrize("state", ["replicated", "sharded"])
def test_what_else_happens_is_possible_in_the_state(state: str) -> None:
    more = [fault.at for seed in range(200) for fault in draw(seed, state).faults[1:]]
    assert {ONLY_STATE.get(at, state) for at in more} == {state}
    assert {at for at in more if at in ONLY_STATE} == {at for at, only in ONLY_STATE.items() if only == state}


def test_a_run_goes_on_where_an_earlier_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    before = play(Verdicts(path, goes_on=False), 10, share=1.0)
    verdicts = Verdicts(path, goes_on=True)
    assert {(each.state, each.seed) for each in verdicts.all()} == set(before[:-1])
    assert verdicts.next([], FIRST) == before[-1]
    state, seed = before[0]
    verdicts.add(Verdict(state, seed, "commit", 1.0, problem="another state"))
    assert verdicts.unsettled() == [before[0]]


def test_steps_are_given_up_by_the_change_that_goes_back_whoever_makes_them_again() -> None:
    """A fault costs seven steps; after two of them comes a planned change. A generation that makes no step gives nothing up."""
    made = {1: (0, range(1, 10)), 2: (5, ()), 3: (2, range(3, 5)), 4: (4, range(5, 20)), 5: (19, range(20, 25))}
    generations = {
        number: LoggedGeneration(number, LogHeader(2, resumed, 1, 96, 3, 12), steps={step: [] for step in steps})
        for number, (resumed, steps) in made.items()
    }
    assert steps_given_up(generations) == {1: 0, 3: 7, 4: 0, 5: 0}
