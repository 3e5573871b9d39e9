"""Completed, drained, crashed or stopped; and the agent's own exit code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.nonempty import every

from elastipod_agent.core.exits import (
    Outcome,
    StopMode,
    WorkerExit,
    agent_exit_code,
    classify,
    describe_status,
    is_late_drain,
    is_port_taken,
)


def exits(*statuses: int, acknowledged: tuple[int, ...] = (), killed: tuple[int, ...] = ()) -> list[WorkerExit]:
    return [WorkerExit(rank, status, rank in acknowledged, rank in killed) for rank, status in enumerate(statuses)]


@pytest.mark.parametrize(
    ("ends", "stop", "outcome"),
    [
        pytest.param(exits(0, 0), StopMode.NONE, Outcome.COMPLETED, id="all exit 0 unasked"),
        pytest.param(exits(0, 0, acknowledged=(0, 1)), StopMode.GRACEFUL, Outcome.DRAINED, id="all drained"),
        pytest.param(exits(0, 0, acknowledged=(0,)), StopMode.GRACEFUL, Outcome.DRAINED, id="one asks for all"),
        pytest.param(exits(0, 0, acknowledged=(0, 1)), StopMode.NONE, Outcome.DRAINED, id="asked through another pod"),
        pytest.param(exits(0, 0), StopMode.GRACEFUL, Outcome.STOPPED, id="finished while a drain was asked, unheard"),
        pytest.param(exits(1, 0), StopMode.NONE, Outcome.CRASHED, id="exit code"),
        pytest.param(exits(0, -11), StopMode.NONE, Outcome.CRASHED, id="signal"),
        pytest.param(exits(3, 0, acknowledged=(0, 1)), StopMode.GRACEFUL, Outcome.CRASHED, id="crash in a drain"),
        pytest.param(exits(-9, -9, killed=(0, 1)), StopMode.HARD, Outcome.STOPPED, id="hard stop"),
        pytest.param(
            exits(0, -9, acknowledged=(0,), killed=(1,)), StopMode.GRACEFUL, Outcome.STOPPED, id="half drained"
        ),
        pytest.param(exits(0, -15, killed=(0, 1)), StopMode.HARD, Outcome.STOPPED, id="exit 0 after SIGTERM"),
        pytest.param(
            exits(1, -9, killed=(1,)), StopMode.NONE, Outcome.CRASHED, id="the first failed, the rest was ended"
        ),
        pytest.param([], StopMode.HARD, Outcome.STOPPED, id="ended before any worker"),
    ],
)
def test_classify(ends: list[WorkerExit], stop: StopMode, outcome: Outcome) -> None:
    assert classify(ends, stop) is outcome


one_exit = st.builds(
    WorkerExit,
    local_rank=st.integers(0, 7),
    status=st.integers(-64, 255),
    acknowledged=st.booleans(),
    killed=st.booleans(),
)


@given(ends=st.lists(one_exit, max_size=8), stop=st.sampled_from(StopMode))
def test_completed_and_drained_need_a_clean_end_of_all(ends: list[WorkerExit], stop: StopMode) -> None:
    if classify(ends, stop) in (Outcome.COMPLETED, Outcome.DRAINED):
        assert ends
        assert every(one.status == 0 and not one.killed for one in ends)
    if classify(ends, stop) is Outcome.COMPLETED:
        assert not any(one.acknowledged for one in ends)


@pytest.mark.parametrize(
    ("last", "is_faulted", "exit_signal", "code"),
    [
        pytest.param(Outcome.COMPLETED, False, 15, 0, id="completed, then SIGTERM"),
        pytest.param(Outcome.DRAINED, False, 15, 0, id="drained, then SIGTERM"),
        pytest.param(Outcome.CRASHED, True, None, 1, id="faulted, then /shutdown"),
        pytest.param(Outcome.CRASHED, True, 15, 1, id="faulted, then SIGTERM"),
        pytest.param(None, False, None, 0, id="/shutdown before any run"),
        pytest.param(None, False, 15, 143, id="SIGTERM before any run"),
        pytest.param(Outcome.STOPPED, False, 2, 130, id="Ctrl-C"),
    ],
)
def test_agent_exit_code(last: Outcome | None, is_faulted: bool, exit_signal: int | None, code: int) -> None:
    assert agent_exit_code(last, is_faulted=is_faulted, exit_signal=exit_signal) == code


@pytest.mark.parametrize(("status", "words"), [(3, "exit code 3"), (-9, "signal SIGKILL"), (-70, "signal signal 70")])
def test_describe_status(status: int, words: str) -> None:
    assert describe_status(status) == words


@pytest.mark.parametrize(
    ("stop", "is_past_deadline", "has_living", "is_late"),
    [
        pytest.param(StopMode.GRACEFUL, True, True, True, id="a drain's time ran out"),
        pytest.param(StopMode.GRACEFUL, True, False, False, id="all had ended by then"),
        pytest.param(StopMode.GRACEFUL, False, True, False, id="there is time left"),
        pytest.param(StopMode.HARD, True, True, False, id="a hard stop after a drain's time ran out"),
        pytest.param(StopMode.HARD, False, True, False, id="a hard stop in a drain"),
        pytest.param(StopMode.NONE, True, True, False, id="nothing was asked"),
    ],
)
def test_only_a_drain_is_late(stop: StopMode, is_past_deadline: bool, has_living: bool, is_late: bool) -> None:
    assert is_late_drain(stop, is_past_deadline=is_past_deadline, has_living=has_living) is is_late


TAKEN = "torch.distributed.DistNetworkError: EADDRINUSE: port: 10010, useIpv6: 0, errno: -98 - Address already in use"


@pytest.mark.parametrize(
    ("global_rank", "tail", "is_taken"),
    [
        pytest.param(0, TAKEN, True, id="rank 0 cannot host the store"),
        pytest.param(3, TAKEN, False, id="another rank listens on a port of its own"),
        pytest.param(0, TAKEN.replace("10010", "8265"), False, id="rank 0 listens on a port of its own"),
        pytest.param(0, "port: 10010: connection refused", False, id="another failure with that port"),
    ],
)
def test_only_rank_0_finds_the_master_port_taken(global_rank: int, tail: str, is_taken: bool) -> None:
    assert is_port_taken(global_rank, tail, 10010) is is_taken
