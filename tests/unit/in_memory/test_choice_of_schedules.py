"""The schedules of `make test-long NAME=inmemory` are chosen by what was seen so far, so that each fault comes often enough."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from tests.e2e.inmemory_schedules import KINDS_AT, place_of
from tests.e2e.inmemory_verdicts import LEAST_OF_EACH, Schedule, Verdict, Verdicts

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


def test_each_fault_comes_ten_times_in_five_hundred_schedules_though_some_do_not_happen(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "verdicts.jsonl", goes_on=False)
    given = play(verdicts, 500, share=0.95)
    assert len(set(given)) == 500
    assert min(seed for _, seed in given) >= FIRST
    assert Counter(state for state, _ in given) == {"replicated": 375, "sharded": 125}
    assert not verdicts.rare(), verdicts.table()


def test_a_fault_that_never_happens_does_not_take_the_place_of_the_others(tmp_path: Path) -> None:
    verdicts = Verdicts(tmp_path / "verdicts.jsonl", goes_on=False)
    given = play(verdicts, 560, share=0.95, never=NEVER)
    assert verdicts.rare() == [NEVER], verdicts.table()
    assert sum(place_of(seed) == NEVER for _, seed in given) <= 3 * (LEAST_OF_EACH + 2)


def test_a_run_goes_on_where_an_earlier_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    before = play(Verdicts(path, goes_on=False), 10, share=1.0)
    verdicts = Verdicts(path, goes_on=True)
    assert {(each.state, each.seed) for each in verdicts.all()} == set(before[:-1])
    assert verdicts.next([], FIRST) == before[-1]
    state, seed = before[0]
    verdicts.add(Verdict(state, seed, "commit", 1.0, problem="another state"))
    assert verdicts.unsettled() == [before[0]]
