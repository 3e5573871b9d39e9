"""In-process restart's decisions, over all states of two ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from elastipod.ipc_wire import RestartMode
from elastipod_agent.core.inprocess_restart import (
    MAX_ATTEMPTS,
    Place,
    Rank,
    RunningRank,
    Verdict,
    gather,
    judge,
    retry_delay_s,
    spoken_mode,
    to_replace,
)

NOW, SOON, PAST = 100.0, 160.0, 90.0
ALL = frozenset({0, 1})
WAITING = {Place.AT_BARRIER, Place.AWAITING_RANK}
RANKS = [
    Rank(place=place, num_failures=failures, is_unwanted=unwanted, gone_at=NOW)
    for place in Place
    for failures in (0, 1, MAX_ATTEMPTS - 1, MAX_ATTEMPTS)
    for unwanted in (False, True)
]


@pytest.mark.parametrize("deadline", [SOON, PAST])
def test_every_pair_of_ranks_is_brought_to_the_barrier_or_given_up(deadline: float) -> None:
    """The rules, in their order: unwanted processes go, hopeless ranks end it, late ones cost all, missing ones come."""
    for pair in product(RANKS, RANKS):
        orders = gather(pair, now=NOW, deadline=deadline)
        alive = frozenset(i for i, rank in enumerate(pair) if rank.place is not Place.GONE)
        unwanted = frozenset(i for i in alive if pair[i].is_unwanted)
        away = frozenset(i for i in alive if pair[i].place not in WAITING)
        gone = ALL - alive
        if unwanted:
            assert (orders.kill, orders.spawn, orders.is_over) == (unwanted, frozenset(), False), pair
        elif any(pair[i].num_failures >= MAX_ATTEMPTS for i in gone):
            assert (orders.is_over, orders.is_hopeless, orders.kill) == (True, True, frozenset()), pair
        elif away and deadline is PAST:
            assert (orders.kill, orders.late) == (alive, away), pair
        else:
            due = frozenset(i for i in gone if retry_delay_s(pair[i].num_failures) == 0)
            assert (orders.spawn, orders.kill) == (due, frozenset()), pair
            assert orders.is_over == (not gone and not away), pair
            assert not orders.is_hopeless
            assert (orders.wake_at is None) == (orders.is_over or bool(due)), "something is left to wait for"


def test_gathering_converges_when_what_it_orders_is_done() -> None:
    """Whatever the start: with processes that come to the barrier it ends with all there, and not in hopelessness."""
    for pair in product(RANKS, RANKS):
        ranks = [replace(rank, num_failures=min(rank.num_failures, MAX_ATTEMPTS - 1)) for rank in pair]
        now, orders = NOW, gather(ranks, now=NOW, deadline=SOON)
        for _ in range(8):
            if orders.is_over:
                break
            now = orders.wake_at or now
            for i in orders.kill:
                lateness = 1 if i in orders.late else 0
                ranks[i] = Rank(place=Place.GONE, num_failures=min(2, ranks[i].num_failures + lateness), gone_at=now)
            for i in orders.spawn:
                ranks[i] = Rank(place=Place.AT_BARRIER)
            orders = gather(ranks, now=now, deadline=max(SOON, now))
        assert (orders.is_over, orders.is_hopeless) == (True, False), pair
        assert all(rank.place in WAITING for rank in ranks)


def test_a_process_that_fails_again_and_again_is_tried_later_each_time() -> None:
    gone = Rank(place=Place.GONE, gone_at=NOW, num_failures=2)
    orders = gather([gone, Rank(place=Place.AT_BARRIER)], now=NOW + 1, deadline=SOON)
    assert (orders.spawn, orders.wake_at) == (frozenset(), NOW + 2)
    assert gather([gone], now=NOW + 2, deadline=SOON).spawn == {0}


@pytest.mark.parametrize(
    ("said", "mode"),
    [
        ("ipr", RestartMode.IN_PROCESS_RESTART),
        ("", RestartMode.IN_PROCESS_RESTART),
        ("in_process", RestartMode.IN_PROCESS_RESTART),
        ("In_Process_Restart", RestartMode.IN_PROCESS_RESTART),
        ("plr", RestartMode.PROCESS_LEVEL_RESTART),
        ("process_level_restart", RestartMode.PROCESS_LEVEL_RESTART),
        ("local_process_level_restart", RestartMode.LOCAL_PRL),
        ("job_level_restart", RestartMode.JOB_LEVEL_RESTART),
        ("whatever comes next year", RestartMode.PROCESS_LEVEL_RESTART),
    ],
)
def test_restart_modes_as_operators_say_them(said: str, mode: RestartMode) -> None:
    assert spoken_mode(said) is mode


@pytest.mark.parametrize("mode", RestartMode)
def test_only_two_modes_keep_processes(mode: RestartMode) -> None:
    keeps = mode in (RestartMode.IN_PROCESS_RESTART, RestartMode.LOCAL_PRL)
    assert to_replace(mode, 2, frozenset({1})) == ({1} if keeps else ALL)


RUNNING = [
    RunningRank(place=place, has_come=has_come, acknowledged=acknowledged)
    for place in Place
    if place is not Place.GONE
    for has_come in (False, True)
    for acknowledged in (False, True)
] + [
    RunningRank(place=Place.GONE, status=status, is_failure=is_failure, acknowledged=acknowledged)
    for status, is_failure in ((0, False), (3, True), (-9, True), (-9, False))
    for acknowledged in (False, True)
]


@pytest.mark.parametrize("is_draining", [False, True])
@pytest.mark.parametrize("come_by", [SOON, PAST])
def test_every_pair_of_running_ranks_is_judged(is_draining: bool, come_by: float) -> None:
    for pair in product(RUNNING, RUNNING):
        verdict = judge(pair, is_draining=is_draining, now=NOW, come_by=come_by)
        has_event = is_draining or any(rank.acknowledged for rank in pair)
        is_back = [rank.place is Place.AT_BARRIER and rank.has_come and has_event for rank in pair]
        if any(rank.is_failure for rank in pair):
            expected = Verdict.CRASHED
        elif all(rank.status is not None or back for rank, back in zip(pair, is_back, strict=True)):
            expected = Verdict.LEFT
        elif come_by is PAST and any(rank.status is None and not rank.has_come for rank in pair):
            expected = Verdict.NEVER_CAME
        else:
            expected = Verdict.GOES_ON
        assert verdict is expected, pair


def test_a_rank_that_is_back_without_any_event_waits_for_the_stop() -> None:
    back = RunningRank(place=Place.AT_BARRIER)
    assert judge([back, back], is_draining=False, now=NOW, come_by=SOON) is Verdict.GOES_ON
