"""Other agents are asked about one that does not answer: whom, when, and what their words come to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.unit.agents.fake_agent import JOB, FakeAgent, serving, until
from yarl import URL

from elastipod_operator.agents import peer_reachability as peers_module
from elastipod_operator.agents.peer_reachability import MAX_NEVER_ANSWERED, PEERS_ASKED
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.agents.status import InvalidStatus, parse_reachability
from elastipod_operator.agents.status_cache import AgentStatusCache
from elastipod_operator.agents.status_requests import LONG_POLL_S, open_session

SILENT = "silent-pod"


class Peer(FakeAgent):
    """An agent of ours that says what the test wants of another one."""

    def __init__(self, word: Any) -> None:
        super().__init__()
        self.say(features=["reach"], status="running")
        self.word = word
        self.asked: list[str] = []
        self.targets: list[str] = []

    async def get(self, request: web.Request) -> web.StreamResponse:
        place = request.query.get("reach")
        if place is None:
            return await super().get(request)
        self.asked.append(place)
        self.targets.append(request.raw_path)
        if self.word == "error":
            return web.Response(status=500)
        return web.json_response({**self.status, "reach": {"address": place, "is_reached": self.word}})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for real silence."""
    monkeypatch.setattr(peers_module, "ASK_AFTER", timedelta(0))
    monkeypatch.setattr(peers_module, "ASK_EVERY_S", 0.05)


@pytest.fixture
async def statuses() -> AsyncIterator[AgentStatusCache]:
    """A status cache with a session of its own."""
    async with open_session() as session:
        statuses = AgentStatusCache(session, lambda _: None)
        yield statuses
        await statuses.close()


async def gone() -> Address:
    """Give an address at which nobody listens any more."""
    agent = FakeAgent()
    async with serving(agent):
        return agent.address


async def watched_with(statuses: AgentStatusCache, stack: AsyncExitStack, *others: FakeAgent) -> None:
    """Watch agents that answer, and then one that does not."""
    for number, other in enumerate(others):
        await stack.enter_async_context(serving(other))
        statuses.watch(f"pod-{number}", other.address)
    await until(lambda: all(statuses.fact(f"pod-{n}").state is not None for n in range(len(others))))
    statuses.watch(SILENT, await gone())


@pytest.mark.parametrize(
    ("words", "is_reached"),
    [
        pytest.param([False], False, id="it cannot reach it"),
        pytest.param([True], True, id="it reaches it"),
        pytest.param([False, True, False], True, id="one that reaches it is proof of life"),
        pytest.param([False, None], False, id="who cannot tell says nothing"),
        pytest.param([None, "error"], None, id="nobody can tell"),
        pytest.param(["maybe"], None, id="nonsense"),
    ],
)
async def test_the_word_of_others(statuses: AgentStatusCache, words: list[Any], is_reached: bool | None) -> None:
    async with AsyncExitStack() as stack:
        others = [Peer(word) for word in words]
        await watched_with(statuses, stack, *others)
        await until(lambda: statuses.fact(SILENT).peers_asked_at is not None)
        assert statuses.fact(SILENT).is_reached is is_reached
        await until(lambda: all(len(other.asked) > 1 for other in others))  # again and again, while it is silent
        for number in range(len(others)):
            statuses.forget(f"pod-{number}")


async def test_what_is_sent_is_what_is_signed(statuses: AgentStatusCache) -> None:
    async with AsyncExitStack() as stack:
        peer = Peer(False)
        await watched_with(statuses, stack, peer)
        await until(lambda: bool(peer.asked))
        place = peer.asked[0]
        assert peer.targets[0] == f"/status?reach={place}"
        statuses.forget("pod-0")


async def test_calls_have_limits_and_follow_no_redirect(
    statuses: AgentStatusCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent is a pod of a tenant: it must not hold the operator up, nor send it elsewhere."""
    seen: dict[str, set[Any]] = {}
    request = aiohttp.ClientSession._request

    async def noting(session: Any, method: str, url: Any, **more: Any) -> Any:
        parts, limit = [*URL(url).query], more["timeout"]
        seen.setdefault("+".join(parts), set()).add((limit.total, limit.sock_connect, more["allow_redirects"]))
        return await request(session, method, url, **more)

    monkeypatch.setattr(aiohttp.ClientSession, "_request", noting)
    async with AsyncExitStack() as stack:
        await watched_with(statuses, stack, Peer(False))
        await until(lambda: statuses.fact(SILENT).peers_asked_at is not None)
        statuses._polled["pod-0"].needs_http_client = True
        for connection in [statuses._polled["pod-0"].connection]:
            assert connection is not None
            connection.close()
        await until(lambda: "after+wait" in seen)
        statuses.forget("pod-0")
    assert seen == {"": {(3, 2, False)}, "reach": {(4, 2, False)}, "after+wait": {(3 + LONG_POLL_S, 2, False)}}


async def test_the_session_of_calls_keeps_no_cookie_unpacks_nothing_and_has_room_for_all() -> None:
    async with open_session() as session:
        assert isinstance(session.cookie_jar, aiohttp.DummyCookieJar)
        assert (session.auto_decompress, session.headers["Accept-Encoding"]) == (False, "identity")
        assert session.connector is not None
        assert session.connector.limit == 0


async def test_only_agents_that_can_tell_and_answer_are_asked(statuses: AgentStatusCache) -> None:
    async with AsyncExitStack() as stack:
        older = Peer(False)
        older.say(features=None)
        await watched_with(statuses, stack, older)
        await until(lambda: statuses.fact(SILENT).connection_refused)
        await asyncio.sleep(0.2)  # it would have been asked three times by now
        assert older.asked == []
        assert statuses.fact(SILENT).peers_asked_at is None
        statuses.forget("pod-0")


async def test_of_many_only_a_few_are_asked(statuses: AgentStatusCache) -> None:
    async with AsyncExitStack() as stack:
        others = [Peer(False) for _ in range(PEERS_ASKED + 3)]
        await watched_with(statuses, stack, *others)
        await until(lambda: statuses.fact(SILENT).peers_asked_at is not None)
        assert sum(bool(other.asked) for other in others) == PEERS_ASKED
        for number in range(len(others)):
            statuses.forget(f"pod-{number}")


async def test_of_many_silent_ones_only_some_are_asked_about_at_a_time(
    statuses: AgentStatusCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that never answered may be coming up: a large job that starts must not bring thousands of calls."""
    monkeypatch.setattr(peers_module, "ASK_EVERY_S", 60.0)
    async with AsyncExitStack() as stack:
        peer = Peer(False)
        await watched_with(statuses, stack, peer)
        nowhere = await gone()
        for number in range(MAX_NEVER_ANSWERED + 10):
            statuses.watch(f"silent-{number}", replace(nowhere, ip=f"127.0.0.{2 + number}"))
        await until(lambda: len(peer.asked) == MAX_NEVER_ANSWERED)
        await until(
            lambda: all(statuses.fact(f"silent-{n}").connection_refused for n in range(MAX_NEVER_ANSWERED + 10))
        )
        await asyncio.sleep(0.2)
        assert len(peer.asked) == MAX_NEVER_ANSWERED
        statuses.forget("pod-0")


async def test_silence_is_first_waited_for(statuses: AgentStatusCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "ASK_AFTER", timedelta(minutes=1))
    async with AsyncExitStack() as stack:
        peer = Peer(False)
        await watched_with(statuses, stack, peer)
        await until(lambda: statuses.fact(SILENT).connection_refused)
        await asyncio.sleep(0.2)
        assert peer.asked == []
        statuses.forget("pod-0")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"status": "running", "protocol": 1, "reach": {"address": "a", "is_reached": True}}, True),
        ({"status": "running", "protocol": 1, "reach": {"address": "b", "is_reached": True}}, None),
        ({"status": "running", "protocol": 1, "reach": {"address": "a"}}, None),
        ({"status": "running", "protocol": 1}, None),
        ({"status": "running", "reach": "my own field"}, None),
    ],
)
def test_what_an_agent_says_is_read_with_care(body: Any, word: bool | None) -> None:
    assert parse_reachability(body, "a") is word


def test_nonsense_is_refused() -> None:
    with pytest.raises(InvalidStatus):
        parse_reachability({"status": "running", "protocol": 1, "reach": 7}, "a")


def test_an_address_with_its_port() -> None:
    given: Callable[[str], str] = lambda ip: Address(JOB, ip, 8080).host_port  # noqa: E731
    assert (given("10.0.0.7"), given("fd00::7")) == ("10.0.0.7:8080", "[fd00::7]:8080")
