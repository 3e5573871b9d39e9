"""In-process restart's decisions, over all states of two ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from tests.nonempty import every

from elastipod.ipc.protocol import RestartMode
from elastipod_agent.core.exits import Outcome
from elastipod_agent.core.inprocess_restart import (
    MAX_ATTEMPTS,
    GatheringRank,
    RankInRun,
    RankPosition,
    RunState,
    StateKind,
    is_followed_by_new_processes,
    keeps_processes,
    kept_after_drain,
    parse_restart_mode,
    plan_gathering,
    pod_state,
    ranks_to_replace,
    retry_delay_s,
    run_state,
)

NOW, SOON, PAST = 100.0, 160.0, 90.0
ALL = frozenset({0, 1})
WAITING = {RankPosition.AT_BARRIER, RankPosition.AWAITING_RANK}
RANKS = [
    GatheringRank(position=place, num_failures=failures, to_be_replaced=unwanted, gone_at=NOW)
    for place in RankPosition
    for failures in (0, 1, MAX_ATTEMPTS - 1, MAX_ATTEMPTS)
    for unwanted in (False, True)
]


@pytest.mark.parametrize("deadline", [SOON, PAST])
def test_every_pair_of_ranks_is_brought_to_the_barrier_or_given_up(deadline: float) -> None:
    """The rules, in their order: unwanted processes go, hopeless ranks end it, late ones cost all, missing ones come."""
    for pair in product(RANKS, RANKS):
        plan = plan_gathering([replace(rank, deadline=deadline) for rank in pair], now=NOW)
        alive = frozenset(i for i, rank in enumerate(pair) if rank.position is not RankPosition.NO_PROCESS)
        unwanted = frozenset(i for i in alive if pair[i].to_be_replaced)
        away = frozenset(i for i in alive if pair[i].position not in WAITING)
        gone = ALL - alive
        if unwanted:
            assert (plan.kill, plan.spawn, plan.is_done) == (unwanted, frozenset(), False), pair
        elif any(pair[i].num_failures >= MAX_ATTEMPTS for i in gone):
            assert (plan.is_done, plan.is_given_up, plan.kill) == (True, True, frozenset()), pair
        elif away and deadline is PAST:
            assert (plan.kill, plan.late) == (alive, away), pair
        else:
            due = frozenset(i for i in gone if retry_delay_s(pair[i].num_failures) == 0)
            assert (plan.spawn, plan.kill) == (due, frozenset()), pair
            assert plan.is_done == (not gone and not away), pair
            assert not plan.is_given_up
            assert (plan.wake_at is None) == (plan.is_done or bool(due)), "something is left to wait for"


def test_gathering_converges_when_what_it_orders_is_done() -> None:
    """Whatever the start: with processes that come to the barrier it ends with all there, and not in hopelessness."""
    for pair in product(RANKS, RANKS):
        ranks = [replace(rank, num_failures=min(rank.num_failures, MAX_ATTEMPTS - 1)) for rank in pair]
        ranks = [replace(rank, deadline=SOON) for rank in ranks]
        now, plan = NOW, plan_gathering(ranks, now=NOW)
        for _ in range(8):
            if plan.is_done:
                break
            now = plan.wake_at or now
            for i in plan.kill:
                lateness = 1 if i in plan.late else 0
                ranks[i] = GatheringRank(
                    position=RankPosition.NO_PROCESS, num_failures=min(2, ranks[i].num_failures + lateness), gone_at=now
                )
            for i in plan.spawn:
                ranks[i] = GatheringRank(position=RankPosition.AT_BARRIER)
            plan = plan_gathering(ranks, now=now)
        assert (plan.is_done, plan.is_given_up) == (True, False), pair
        assert every(rank.position in WAITING for rank in ranks)


def test_a_process_that_fails_again_and_again_is_tried_later_each_time() -> None:
    gone = GatheringRank(position=RankPosition.NO_PROCESS, gone_at=NOW, num_failures=2)
    plan = plan_gathering([gone, GatheringRank(position=RankPosition.AT_BARRIER)], now=NOW + 1)
    assert (plan.spawn, plan.wake_at) == (frozenset(), NOW + 2)
    assert plan_gathering([gone], now=NOW + 2).spawn == {0}


def test_a_rank_that_has_more_time_than_another_is_waited_for_until_its_own_deadline() -> None:
    back = GatheringRank(position=RankPosition.PAST_BARRIER, deadline=SOON)
    new = GatheringRank(position=RankPosition.STARTING, deadline=SOON + 50)
    assert plan_gathering([back, new], now=NOW).wake_at == SOON
    plan = plan_gathering([back, new], now=SOON)
    assert (plan.late, plan.kill) == (frozenset({0}), ALL)
    assert plan_gathering([replace(back, position=RankPosition.AT_BARRIER), new], now=SOON).wake_at == SOON + 50


@pytest.mark.parametrize(
    ("said", "after_drain", "after_hard_stop", "told"),
    [
        pytest.param("", True, False, None, id="an operator that knows of no kept workers"),
        pytest.param("in_process_restart", True, True, True, id="in process"),
        pytest.param("ipr", True, True, True, id="in process, in short"),
        pytest.param("local_process_level_restart", True, True, True, id="but one"),
        pytest.param("process_level_restart", False, False, False, id="new processes"),
        pytest.param("job_level_restart", False, False, False, id="new pods"),
        pytest.param("whatever comes next year", False, False, False, id="unknown"),
    ],
)
def test_what_a_stop_leaves_to_workers_that_can_live_on(
    said: str, after_drain: bool, after_hard_stop: bool, told: bool | None
) -> None:
    assert keeps_processes(said, is_graceful=True) is after_drain
    assert keeps_processes(said, is_graceful=False) is after_hard_stop
    assert kept_after_drain(said) is told


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("leaves", [True, False, None])
@pytest.mark.parametrize("said", ["", "in_process_restart", "process_level_restart", "job_level_restart"])
def test_new_processes_follow_a_drain_where_the_operator_says_so(
    outcome: Outcome, leaves: bool | None, said: str
) -> None:
    is_certain = (outcome, leaves, said) == (Outcome.DRAINED, False, "process_level_restart")
    assert is_followed_by_new_processes(outcome, said, leaves=leaves) is is_certain


def test_a_pod_keeps_what_all_its_workers_announced() -> None:
    replicated, sharded = StateKind.REPLICATED, StateKind.SHARDED
    assert pod_state([]) is None
    assert pod_state([replicated, None]) is None
    assert pod_state([replicated, replicated]) is replicated
    assert pod_state([replicated, sharded]) is sharded


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
    assert parse_restart_mode(said) is mode


@pytest.mark.parametrize("mode", RestartMode)
def test_only_two_modes_keep_processes(mode: RestartMode) -> None:
    keeps = mode in (RestartMode.IN_PROCESS_RESTART, RestartMode.LOCAL_PRL)
    assert ranks_to_replace(mode, 2, frozenset({1})) == ({1} if keeps else ALL)


RUNNING = [
    RankInRun(position=place, has_joined=has_joined, acknowledged=acknowledged)
    for place in RankPosition
    if place is not RankPosition.NO_PROCESS
    for has_joined in (False, True)
    for acknowledged in (False, True)
] + [
    RankInRun(position=RankPosition.NO_PROCESS, status=status, is_failure=is_failure, acknowledged=acknowledged)
    for status, is_failure in ((0, False), (3, True), (-9, True), (-9, False))
    for acknowledged in (False, True)
]


@pytest.mark.parametrize("is_draining", [False, True])
@pytest.mark.parametrize("join_by", [SOON, PAST])
def test_every_pair_of_running_ranks_is_judged(is_draining: bool, join_by: float) -> None:
    for pair in product(RUNNING, RUNNING):
        state = run_state(pair, is_draining=is_draining, now=NOW, join_by=join_by)
        has_event = is_draining or any(rank.acknowledged for rank in pair)
        has_returned = [rank.position is RankPosition.AT_BARRIER and rank.has_joined and has_event for rank in pair]
        if any(rank.is_failure for rank in pair):
            expected = RunState.CRASHED
        elif all(rank.status is not None or back for rank, back in zip(pair, has_returned, strict=True)):
            expected = RunState.ENDED
        elif join_by is PAST and any(rank.status is None and not rank.has_joined for rank in pair):
            expected = RunState.START_MISSED
        else:
            expected = RunState.RUNNING
        assert state is expected, pair


def test_a_rank_that_is_back_without_any_event_waits_for_the_stop() -> None:
    back = RankInRun(position=RankPosition.AT_BARRIER)
    assert run_state([back, back], is_draining=False, now=NOW, join_by=SOON) is RunState.RUNNING
