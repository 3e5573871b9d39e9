"""The board and agents that are no more: a port that is refused, a container that ended or was started again."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.agents.fake_agent import JOB, StandIn, serving, until

from elastipod_operator.agents import status_cache as status_cache
from elastipod_operator.agents.polls import ConnectFailed
from elastipod_operator.agents.status_cache import Board, Watched, open_session
from elastipod_operator.core.snapshot import AgentState

POD = "pod-uid"


@pytest.fixture
async def board() -> AsyncIterator[Board]:
    """A board with a session of its own."""
    async with open_session() as session:
        board = Board(session, lambda _: None)
        yield board
        await board.close()


async def answered(board: Board, agent: StandIn) -> None:
    board.watch(POD, agent.address)
    await until(lambda: board.fact(POD).state is not None)


async def test_what_an_agent_said_last_stays_known_after_its_end(board: Board) -> None:
    agent = StandIn()
    agent.say(status="completed", generation=3)
    async with serving(agent):
        await answered(board, agent)
        board.retire(POD)
    polls = len(agent.polls)
    fact = board.fact(POD)
    assert (fact.state, fact.generation, fact.refused) == (AgentState.COMPLETED, 3, False)
    assert board.watches(POD, agent.address.ip, agent.address.port), "it is not asked again"
    assert len(agent.polls) == polls
    board.forget(POD)
    assert board.fact(POD).state is None


async def test_who_was_never_asked_can_retire_too(board: Board) -> None:
    board.retire("never watched")
    assert board.fact("never watched").state is None


async def test_a_process_that_was_started_again_is_asked_anew(board: Board) -> None:
    agent = StandIn()
    agent.say(status="running", generation=1)
    async with serving(agent):
        await answered(board, agent)
        again = replace(agent.address, restarts=1)
        assert not board.watches(POD, again.ip, again.port, 1)
        agent.say(status="ready", generation=0)
        board.watch(POD, again)
        assert board.fact(POD).state is None, "what the process before it said is not its word"
        await until(lambda: board.fact(POD).state is AgentState.READY)
        assert board.watches(POD, again.ip, again.port, 1)
        board.forget(POD)


@pytest.mark.parametrize(
    ("code", "refused"), [(errno.ECONNREFUSED, True), (errno.EHOSTUNREACH, False), (errno.ENETUNREACH, False)]
)
async def test_only_a_refused_connection_tells_that_nobody_listens(
    board: Board, monkeypatch: pytest.MonkeyPatch, code: int, refused: bool
) -> None:
    tried: list[int] = []

    async def ask(self: Board, watched: Watched) -> Any:
        tried.append(code)
        raise ConnectFailed(code, "no way")

    monkeypatch.setattr(Board, "_ask", ask)
    monkeypatch.setattr(status_cache, "FIRST_RETRY_S", 0.01)
    board.watch(POD, replace(StandIn().address, job=JOB, ip="127.0.0.1", port=1))
    await until(lambda: len(tried) > 1)
    assert board.fact(POD).refused is refused
