"""The status cache and agents that are no more: a port that is refused, a container that ended or was started again."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.agents.fake_agent import JOB, FakeAgent, serving, until

from elastipod_operator.agents import status_cache as status_cache
from elastipod_operator.agents.polled_agent import PolledAgent
from elastipod_operator.agents.polls import ConnectFailed
from elastipod_operator.agents.status_cache import AgentStatusCache
from elastipod_operator.agents.status_requests import StatusRequests, open_session
from elastipod_operator.core.snapshot import AgentState

POD = "pod-uid"


@pytest.fixture
async def statuses() -> AsyncIterator[AgentStatusCache]:
    """A status cache with a session of its own."""
    async with open_session() as session:
        statuses = AgentStatusCache(session, lambda _: None)
        yield statuses
        await statuses.close()


async def answered(statuses: AgentStatusCache, agent: FakeAgent) -> None:
    statuses.watch(POD, agent.address)
    await until(lambda: statuses.fact(POD).state is not None)


async def test_what_an_agent_said_last_stays_known_after_its_end(statuses: AgentStatusCache) -> None:
    agent = FakeAgent()
    agent.say(status="completed", generation=3)
    async with serving(agent):
        await answered(statuses, agent)
        statuses.stop_polling(POD)
    polls = len(agent.polls)
    fact = statuses.fact(POD)
    assert (fact.state, fact.generation, fact.connection_refused) == (AgentState.COMPLETED, 3, False)
    assert statuses.watches(POD, agent.address.ip, agent.address.port), "it is not asked again"
    assert len(agent.polls) == polls
    statuses.forget(POD)
    assert statuses.fact(POD).state is None


async def test_an_agent_that_has_ended_is_not_listened_to_any_more(statuses: AgentStatusCache) -> None:
    """Its address may be that of another job's pod by now, and its answers that one's."""
    agent, other = FakeAgent(), "another pod"
    agent.say(status="completed", generation=3)
    async with serving(agent):
        await answered(statuses, agent)
        statuses.watch(other, agent.address)
        await until(lambda: statuses.fact(other).state is AgentState.COMPLETED)
        statuses.stop_polling(POD)
        for state in (AgentState.READY, AgentState.RUNNING):
            agent.say(status=state.value)
            await until(lambda wanted=state: statuses.fact(other).state is wanted)  # type: ignore[misc]
        assert statuses.fact(POD).state is AgentState.COMPLETED
        statuses.forget(other)


async def test_who_was_never_asked_can_retire_too(statuses: AgentStatusCache) -> None:
    statuses.stop_polling("never watched")
    assert statuses.fact("never watched").state is None


async def test_a_process_that_was_started_again_is_asked_anew(statuses: AgentStatusCache) -> None:
    agent = FakeAgent()
    agent.say(status="running", generation=1)
    async with serving(agent):
        await answered(statuses, agent)
        again = replace(agent.address, restarts=1)
        assert not statuses.watches(POD, again.ip, again.port, 1)
        agent.say(status="ready", generation=0)
        statuses.watch(POD, again)
        assert statuses.fact(POD).state is None, "what the process before it said is not its word"
        await until(lambda: statuses.fact(POD).state is AgentState.READY)
        assert statuses.watches(POD, again.ip, again.port, 1)
        statuses.forget(POD)


@pytest.mark.parametrize(
    ("code", "refused"), [(errno.ECONNREFUSED, True), (errno.EHOSTUNREACH, False), (errno.ENETUNREACH, False)]
)
async def test_only_a_refused_connection_tells_that_nobody_listens(
    statuses: AgentStatusCache, monkeypatch: pytest.MonkeyPatch, code: int, refused: bool
) -> None:
    tried: list[int] = []

    async def ask(self: StatusRequests, polled: PolledAgent, poll_s: object) -> Any:
        tried.append(code)
        raise ConnectFailed(code, "no way")

    monkeypatch.setattr(StatusRequests, "ask", ask)
    monkeypatch.setattr(status_cache, "FIRST_RETRY_S", 0.01)
    statuses.watch(POD, replace(FakeAgent().address, job=JOB, ip="127.0.0.1", port=1))
    await until(lambda: len(tried) > 1)
    assert statuses.fact(POD).connection_refused is refused
