"""Random schedules of faults and wishes: whatever happens, the invariants hold and the job gets where it should."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Set
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest
from tests.long_runs import LongRun
from tests.sim.conftest import DEFAULT_SCHEDULES, SEEDS_OF_A_TEST, all_seeds
from tests.sim.events import Event, Make, Preparing
from tests.sim.failures import explain, failure_of
from tests.sim.fault_targets import BLIND_FOR_GOOD, BLINDNESS, FENCED_AGAIN_S, LATE_WRITERS, SEEN_AGAIN_S
from tests.sim.faults import FAULTS
from tests.sim.neighbour_schedules import NEIGHBOUR_TURNS
from tests.sim.queue_faults import QUEUE_FAULTS
from tests.sim.random_schedules import CHAOS_S, draw
from tests.sim.required_coverage import MUST_MEET
from tests.sim.scripted_queue_schedules import QUEUE_SCHEDULES, QUEUE_TURNS
from tests.sim.scripted_schedules import ENDING_TURNS, SCHEDULES, TURNS
from tests.sim.simulation import Simulation
from tests.slow import all_but_every, all_but_first

LONG_RUN_S = 240.0
SEEDS_OF_A_PROCESS = 10
KEEPING_SCHEDULES = 20
PREPARING = (None, Preparing.SUCCEEDS, Preparing.FAILS, Preparing.DIES)
MAX_STORIES = 3
# Faults and what follows from them may suspend the limits of time for quota in this share of the looks at it.
EXCUSED_LOOKS = 0.2
# The shortest turn has a record, four pods that go, and the status.
LEAST_CALLS = 8
ALL_FAULTS = FAULTS | QUEUE_FAULTS
ALL_SCHEDULES = SCHEDULES | QUEUE_SCHEDULES
ALL_TURNS = TURNS | QUEUE_TURNS | ENDING_TURNS | NEIGHBOUR_TURNS
# Of long turns, before every sixth call: which ones, differs from turn to turn. The long run has all.
SAMPLED = 6
MOST_CALLS_OF_DEATH = 15


def _play(seeds: Iterable[int]) -> tuple[list[str], Counter[str]]:
    """Run the schedules; give those that failed, explained, and what was met in all of them."""
    failed: list[str] = []
    met: Counter[str] = Counter()
    for seed in seeds:
        schedule = draw(seed)
        if failure_of(schedule, met) is not None:
            failed.append(f"{explain(schedule)}\n\nrun it again: make sim SEED={seed}")
            if len(failed) == MAX_STORIES:
                break
    return failed, met


def _fail_with(failed: list[str]) -> None:
    if failed:
        pytest.fail("\n\n----\n\n".join(failed), pytrace=False)


def test_every_schedule_keeps_the_invariants_and_ends_well(
    seeds: range, shared_folder: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]
) -> None:
    failed, met = _play(seeds)
    _fail_with(failed)
    if len(seeds) == 1:
        with capsys.disabled():
            print("\n" + Simulation(draw(seeds[0])).run().told())
    if len(all_seeds(pytestconfig)) >= DEFAULT_SCHEDULES:
        _check_coverage(pytestconfig, shared_folder, f"seeds from {seeds[0]}", met)


@pytest.mark.parametrize(
    ("what", "excuses", "after_s", "most"),
    [
        pytest.param("who may write", LATE_WRITERS, FENCED_AGAIN_S, 0.06, id="who may write"),
        pytest.param("how soon a lost node is seen", BLINDNESS, SEEN_AGAIN_S, 0.15, id="how soon a lost node is seen"),
    ],
)
def test_an_invariant_is_switched_off_for_little_of_the_time(
    what: str, excuses: Set[str], after_s: float, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is checked again once nothing that came of the fault can be on its way."""
    drawn = [draw(seed) for seed in range(DEFAULT_SCHEDULES)]
    excused_s = 0.0
    for one in drawn:
        begins = 0.0
        for event in sorted(one.events, key=lambda event: event.at):
            if event.what in excuses:
                lasts_s = math.inf if event.what == BLIND_FOR_GOOD else event.seconds + after_s
                ends = min(CHAOS_S, event.at + lasts_s)
                excused_s += max(0.0, ends - max(begins, event.at))
                begins = max(begins, ends)
    share = excused_s / (CHAOS_S * len(drawn))
    with capsys.disabled():
        print(f"\n{what}: not checked for {share:.1%} of the time of {len(drawn)} schedules")
    assert 0 < share <= most


def _check_coverage(config: pytest.Config, folder: Path, name: str, met: Counter[str]) -> None:
    """Note what was met in one part; the part that ends last checks that everything was, by chance or by script."""
    (folder / f"{name}.draft").write_text(json.dumps(met))
    (folder / f"{name}.draft").rename(folder / f"{name}.json")
    parts = list(folder.glob("*.json"))
    if len(parts) == math.ceil(len(all_seeds(config)) / SEEDS_OF_A_TEST) + len(ALL_SCHEDULES):
        everything: Counter[str] = sum((Counter(json.loads(part.read_text())) for part in parts), Counter())
        missed = {what for what in (*ALL_FAULTS, *MUST_MEET) if not everything[what]}
        assert not missed, "what never really happened proves nothing"
        excused = everything["quota: excused looks"] / everything["quota: looks"]
        print(
            f"\nlimits of time for giving quota back: not checked in {excused:.0%} of {everything['quota: looks']} looks"
        )
        assert excused <= EXCUSED_LOOKS, "of the looks at who keeps quota"


@pytest.mark.parametrize("name", all_but_every(3, ALL_SCHEDULES))
def test_a_scripted_schedule_ends_well(name: str, shared_folder: Path, pytestconfig: pytest.Config) -> None:
    met: Counter[str] = Counter()
    if failure_of(ALL_SCHEDULES[name], met) is not None:
        pytest.fail(explain(ALL_SCHEDULES[name]), pytrace=False)
    _check_coverage(pytestconfig, shared_folder, f"script {list(ALL_SCHEDULES).index(name)}", met)


def test_workers_of_a_growth_come_to_the_barrier_before_the_others_stop() -> None:
    met: Counter[str] = Counter()
    schedule = SCHEDULES["workers start ahead of a growth: they come to the barrier"]
    assert failure_of(schedule, met) is None
    assert met["in memory: workers were at the barrier before the others stopped"] == 1, met
    met.clear()
    schedule = SCHEDULES["workers of a spare start ahead, and a node is lost"]
    assert failure_of(schedule, met) is None
    assert met["in memory: prepared workers start"], met


def test_new_workers_of_pods_that_stay_wait_at_the_barrier_for_a_start_that_is_late() -> None:
    met: Counter[str] = Counter()
    schedule = SCHEDULES["workers start when the old ones have ended: the operator dies at 69"]
    assert failure_of(schedule, met) is None
    assert met["in memory: prepared workers start"] == 3, met


@pytest.mark.parametrize(
    "what",
    [
        "the user scales down and up",
        "a node is drained",
        "a node is tainted",
        "increments give way to a gang and come back",
    ],
)
def test_those_who_leave_hand_their_shards_over_first(what: str) -> None:
    met: Counter[str] = Counter()
    assert failure_of(ALL_SCHEDULES[f"workers keep shards of the state in memory: {what}"], met) is None
    assert met["in memory: shards are handed over"] >= 1, met
    assert met["in memory: a generation goes on from it"] in (3, 4), (
        "the first growth, one shrink or two, and the growth after it"
    )


@pytest.mark.parametrize(
    "what",
    [
        "a worker crashes in a drain",
        "one that is to leave crashes in a drain",
        "a worker crashes in a drain, because a node is drained",
        "a worker crashes in a drain, because a node is tainted",
        "a worker crashes in a drain, because a machine of Spot is taken back",
        "a worker crashes in a drain, and the operator dies",
        "one crashes while increments give way to a gang",
    ],
)
def test_a_fault_in_a_shrink_brings_those_back_who_were_to_leave(what: str) -> None:
    met: Counter[str] = Counter()
    assert failure_of(ALL_SCHEDULES[f"workers keep shards of the state in memory: {what}"], met) is None
    assert met["in memory: who was to leave is a member again after a fault"] == 1, met


@pytest.mark.parametrize(
    "what",
    [
        "a notice of 120 s",
        "a notice of 30 s",
        "a notice of 30 s, and workers that keep their state",
        "two notices of 30 s",
    ],
)
def test_a_notice_of_spot_costs_the_survivors_no_step(what: str) -> None:
    """By report of the generation that follows: the first one is that of the growth before the notice."""
    simulation = Simulation(SCHEDULES[f"Spot: {what}"]).run()
    at = next(number for number, line in enumerate(simulation.log) if "spot_notice" in line)
    following = next(line for line in simulation.log[at:] if "trains from step" in line)
    assert following.endswith("(0 repeated)")
    assert not following.endswith("trains from step 0 (0 repeated)")


@pytest.mark.parametrize("make", all_but_first([Make.KEEPING, Make.SHARDING]), ids=["replicated", "sharded"])
@pytest.mark.parametrize("first", range(0, KEEPING_SCHEDULES, SEEDS_OF_A_TEST))
def test_every_schedule_of_workers_that_keep_their_state_ends_well(first: int, make: Make) -> None:
    """The same faults as ever, with workers that live through resizes and faults in their processes."""
    met: Counter[str] = Counter()
    for seed in range(first, min(first + SEEDS_OF_A_TEST, KEEPING_SCHEDULES)):
        schedule = replace(draw(seed), make=make, preparing=PREPARING[seed % len(PREPARING)])
        if failure_of(schedule, met) is not None:
            pytest.fail(f"seed {seed}\n{explain(schedule)}", pytrace=False)
    assert met["in memory: a generation goes on from it"]


@pytest.mark.parametrize("turn", all_but_first(ALL_TURNS, 2))
def test_the_operator_may_die_between_two_calls(turn: str) -> None:
    """Before the first call that the schedule is about, after it, after the second one, and so on to the last."""
    called = _calls_of(turn)
    is_sampled = called > MOST_CALLS_OF_DEATH
    _die(turn, range(list(ALL_TURNS).index(turn) % SAMPLED, called, SAMPLED) if is_sampled else range(called))


@pytest.mark.long("sim")
@pytest.mark.parametrize("turn", ALL_TURNS)
def test_the_operator_may_die_between_any_two_calls(turn: str, long_run: LongRun) -> None:
    called = _calls_of(turn)
    _die(turn, range(called))
    long_run.count(**{f"deaths during {turn}": called})


def _calls_of(turn: str) -> int:
    """Give how many calls the operator makes in a turn."""
    begin, end, schedule = ALL_TURNS[turn]
    called = sum(begin <= at < end for at in Simulation(schedule).run().cluster.called_at)
    assert called >= LEAST_CALLS, "the turn is somewhere else in the schedule"
    return called


def _die(turn: str, calls_of_death: Iterable[int]) -> None:
    begin, _, schedule = ALL_TURNS[turn]
    for calls in calls_of_death:
        events = sorted((*schedule.events, Event(begin, "operator_dies_after", calls, 2.0)), key=lambda e: e.at)
        dies = replace(schedule, events=tuple(events))
        met: Counter[str] = Counter()
        if failure_of(dies, met) is not None:
            pytest.fail(f"dead after {calls} calls\n" + explain(dies), pytrace=False)
        assert met["the operator dies before a call"]


@pytest.mark.long("sim")
def test_thousands_of_schedules_keep_the_invariants(seed: int, long_run: LongRun) -> None:
    """On all processors: each plays some seeds in a row, and then the next ones that nobody has played."""
    until, num_processes = time.monotonic() + LONG_RUN_S, len(os.sched_getaffinity(0))
    begins, count = itertools.count(seed, SEEDS_OF_A_PROCESS), 0
    met: Counter[str] = Counter()
    failed: list[str] = []
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork")) as pool:

        def next_ones() -> Future[tuple[list[str], Counter[str]]]:
            first = next(begins)
            return pool.submit(_play, range(first, first + SEEDS_OF_A_PROCESS))

        under_way = {next_ones() for _ in range(num_processes)}
        while under_way:
            ended, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for one in ended:
                stories, found = one.result()
                failed, met, count = failed + stories, met + found, count + SEEDS_OF_A_PROCESS
                if time.monotonic() < until and not failed:
                    under_way.add(next_ones())
            long_run.count(schedules=count, last_seed=seed + count - 1, faults=sum(met[name] for name in ALL_FAULTS))
    long_run.detail(met=dict(sorted(met.items())))
    _fail_with(failed[:MAX_STORIES])
    assert count


@pytest.mark.slow
def test_the_same_seed_gives_the_same_schedule() -> None:
    for queued in (False, True):
        first, second = (Simulation(draw(15, queued=queued)).run().log for _ in range(2))
        assert first == second
