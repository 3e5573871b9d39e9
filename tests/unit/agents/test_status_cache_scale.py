"""The status cache of a fleet so large that polls last longer than a heartbeat: silence and news are known as early as ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import pytest
from aiohttp import web
from tests.nonempty import every
from tests.unit.agents.fake_agent import JOB, FakeAgent, serving, until

from elastipod_operator.agents import polls as polls_module
from elastipod_operator.agents import status as answers_module
from elastipod_operator.agents import status_cache as status_cache
from elastipod_operator.agents import status_requests
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.agents.status_cache import AgentStatusCache
from elastipod_operator.agents.status_requests import LONG_POLL_S, open_session

ONE, OTHER = "one", "other"


@pytest.fixture
async def wakes() -> list[str]:
    """Who was woken so far."""
    return []


@pytest.fixture
async def statuses(wakes: list[str], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AgentStatusCache]:
    """A status cache to which two agents are very many."""
    monkeypatch.setattr(status_cache, "POLLS_PER_S", 0.01)
    async with open_session() as session:
        statuses = AgentStatusCache(session, wakes.append)
        yield statuses
        await statuses.close()


@pytest.fixture
async def agent() -> AsyncIterator[FakeAgent]:
    """An agent that serves."""
    async with serving(FakeAgent()) as agent:
        yield agent


def answered(statuses: AgentStatusCache, pod: str = ONE) -> datetime:
    at = statuses.fact(pod).last_answer
    assert at is not None
    return at


async def held(statuses: AgentStatusCache, agent: FakeAgent, pod: str = ONE) -> None:
    """Watch an agent until it holds a long poll."""
    statuses.watch(pod, agent.address)
    await until(lambda: len(agent.polls) == 2)


async def test_polls_of_many_agents_last_longer_and_not_equally_long(
    statuses: AgentStatusCache, agent: FakeAgent
) -> None:
    async with serving(FakeAgent()) as other:
        await held(statuses, agent)
        await held(statuses, other, OTHER)
        waits = [float(agent.polls[1]["wait"]), float(other.polls[1]["wait"])]
        statuses.forget(OTHER)
    longest = status_cache.LONGEST_POLL_S
    shortest = (1 - status_cache.SPREAD) * longest - status_cache.TICK_S
    assert every(shortest <= wait <= longest for wait in waits)
    assert waits[0] != waits[1]


@pytest.mark.parametrize("wait_s", [3.5, 27.3, 45.0])
@pytest.mark.parametrize("now", [0.0, 1234.56789, 98765.4999])
def test_polls_end_with_a_tick_and_not_later_than_asked(now: float, wait_s: float) -> None:
    wait = status_cache.align_to_tick(now, wait_s)
    assert wait_s - status_cache.TICK_S < wait <= wait_s
    assert (now + wait) / status_cache.TICK_S == pytest.approx(round((now + wait) / status_cache.TICK_S), abs=1e-6)


async def test_a_change_arrives_at_once_all_the_same(
    statuses: AgentStatusCache, agent: FakeAgent, wakes: list[str]
) -> None:
    await held(statuses, agent)
    agent.say(status="running", generation=1)
    await until(lambda: statuses.fact(ONE).generation == 1)
    assert wakes == [JOB, JOB]


async def test_while_a_poll_is_held_the_kernel_tells_that_the_machine_lives(
    statuses: AgentStatusCache, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(polls_module.PROBES, "TCP_KEEPIDLE", 1)
    await held(statuses, agent)
    first = answered(statuses)
    await until(lambda: answered(statuses) - first > timedelta(seconds=0.9))
    assert len(agent.polls) == 2


async def test_an_answer_after_a_long_poll_is_no_return_from_silence(
    statuses: AgentStatusCache, agent: FakeAgent, wakes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (status_cache, answers_module):
        monkeypatch.setattr(module, "SILENCE_LIMIT", timedelta(seconds=0.1))
    await held(statuses, agent)
    since, first = statuses.fact(ONE).answering_since, answered(statuses)
    await until(lambda: datetime.now(UTC) - first > timedelta(seconds=0.15))
    agent.say(message="nothing that matters")
    await until(lambda: answered(statuses) - first > timedelta(seconds=0.1) and len(agent.polls) == 3)
    assert (wakes, statuses.fact(ONE).answering_since) == ([JOB], since)


async def test_at_the_first_doubt_about_one_all_agents_of_its_job_are_asked(
    statuses: AgentStatusCache, agent: FakeAgent
) -> None:
    async with serving(FakeAgent()) as other:
        await held(statuses, agent)
        await held(statuses, other, OTHER)
        agent.status["worker"] = {"step": 7}  # no new version: only who asks learns of it
    await until(lambda: statuses.fact(OTHER).connection_refused)
    await until(lambda: statuses.fact(ONE).step == 7 and len(agent.polls) == 4)
    first, second = agent.polls[2:]
    assert (first, second["after"], float(second["wait"]) <= LONG_POLL_S) == ({}, "1", True)
    statuses.forget(OTHER)


async def test_agents_of_other_jobs_are_left_alone(statuses: AgentStatusCache, agent: FakeAgent) -> None:
    async with serving(FakeAgent()) as other:
        await held(statuses, agent)
        other.address = Address("another job", other.address.ip, other.address.port)
        await held(statuses, other, OTHER)
    await until(lambda: statuses.fact(OTHER).connection_refused)
    assert len(agent.polls) == 2
    statuses.forget(OTHER)


async def test_a_process_that_hangs_is_silent_since_its_last_answer(
    statuses: AgentStatusCache, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel lives and acknowledges everything."""
    for name, value in (("TICK_S", 0.001), ("LONG_POLL_S", 0.01), ("LONGEST_POLL_S", 0.05), ("CONNECT_S", 0.05)):
        monkeypatch.setattr(status_cache, name, value)
        monkeypatch.setattr(status_requests, name, value, raising=False)
    forever = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        await forever.wait()
        return web.json_response(agent.status)

    statuses.watch(ONE, agent.address)
    await until(lambda: len(agent.polls) >= 2)
    agent.respond = never
    await until(lambda: statuses.fact(ONE).last_answer is not None and len(agent.polls) >= 4)
    first = answered(statuses)
    asked = len(agent.polls)
    await until(lambda: len(agent.polls) > asked)
    assert answered(statuses) == first
    forever.set()
