"""The status cache against agents in this process: current, patient, and not to be upset."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from tests.nonempty import every
from tests.patience import PATIENCE_S
from tests.unit.agents.fake_agent import JOB, FakeAgent, serving, until

from elastipod_operator.agents import status_cache as status_cache
from elastipod_operator.agents.authentication import Credentials
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.agents.status import MAX_RESPONSE_BYTES
from elastipod_operator.agents.status_cache import AgentStatusCache
from elastipod_operator.agents.status_requests import LONG_POLL_S, open_session
from elastipod_operator.agents.told_checkpoints import checkpoint_step
from elastipod_operator.core.snapshot import AgentState

POD = "pod-uid"


class Wakes(list[str]):
    """Notes who was woken."""


@pytest.fixture
async def wakes() -> Wakes:
    """Who was woken so far."""
    return Wakes()


@pytest.fixture
async def statuses(wakes: Wakes) -> AsyncIterator[AgentStatusCache]:
    """A status cache with a session of its own."""
    async with open_session() as session:
        statuses = AgentStatusCache(session, wakes.append)
        yield statuses
        await statuses.close()


@pytest.fixture
async def agent() -> AsyncIterator[FakeAgent]:
    """An agent that serves."""
    async with serving(FakeAgent()) as agent:
        yield agent


def state(statuses: AgentStatusCache) -> AgentState | None:
    return statuses.fact(POD).state


async def test_a_change_arrives_at_once_and_wakes_the_job(
    statuses: AgentStatusCache, agent: FakeAgent, wakes: Wakes
) -> None:
    statuses.watch(POD, agent.address)
    await until(lambda: state(statuses) is AgentState.READY)
    assert wakes == [JOB]
    await until(lambda: len(agent.polls) == 2)
    agent.say(status="running", generation=1)
    await until(lambda: state(statuses) is AgentState.RUNNING)
    assert wakes == [JOB, JOB]
    assert agent.polls[1]["after"] == "1"
    assert LONG_POLL_S - status_cache.TICK_S < float(agent.polls[1]["wait"]) <= LONG_POLL_S


async def test_a_newcomer_that_has_become_warm_wakes_the_job(
    statuses: AgentStatusCache, agent: FakeAgent, wakes: Wakes
) -> None:
    agent.say(warming=True)
    statuses.watch(POD, agent.address)
    await until(lambda: statuses.fact(POD).warming)
    await until(lambda: len(agent.polls) == 2)
    agent.say(warming=False)
    await until(lambda: not statuses.fact(POD).warming)
    assert wakes == [JOB, JOB]


async def test_progress_after_the_first_step_wakes_nobody(
    statuses: AgentStatusCache, agent: FakeAgent, wakes: Wakes
) -> None:
    statuses.watch(POD, agent.address)
    await until(lambda: len(agent.polls) == 2)
    agent.say(worker={"step": 12})
    await until(lambda: statuses.fact(POD).step == 12)
    assert wakes == [JOB, JOB]
    agent.say(worker={"step": 13})
    await until(lambda: statuses.fact(POD).step == 13)
    assert wakes == [JOB, JOB]


async def test_an_agent_of_another_make_is_polled(
    statuses: AgentStatusCache, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_cache, "PLAIN_POLL_S", 0.01)
    agent.status = {"status": "ready"}
    statuses.watch(POD, agent.address)
    await until(lambda: len(agent.polls) >= 3)
    assert every(query == {} for query in agent.polls)
    assert statuses.fact(POD).generation is None


async def test_watching_the_same_agent_again_changes_nothing(statuses: AgentStatusCache, agent: FakeAgent) -> None:
    statuses.watch(POD, agent.address)
    await until(lambda: state(statuses) is AgentState.READY)
    statuses.watch(POD, agent.address)
    assert state(statuses) is AgentState.READY


async def test_an_agent_at_a_new_address_is_a_new_one(statuses: AgentStatusCache, agent: FakeAgent) -> None:
    statuses.watch(POD, agent.address)
    await until(lambda: state(statuses) is AgentState.READY)
    async with serving(FakeAgent()) as other:
        other.say(status="init")
        statuses.watch(POD, other.address)
        assert state(statuses) is None
        await until(lambda: state(statuses) is AgentState.INIT)
        statuses.forget(POD)


async def test_a_pod_that_is_forgotten_is_not_asked_any_more(statuses: AgentStatusCache, agent: FakeAgent) -> None:
    statuses.watch(POD, agent.address)
    await until(lambda: state(statuses) is AgentState.READY)
    statuses.forget(POD)
    assert statuses.fact(POD).last_answer is None
    statuses.forget("never watched")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param(500, b"oops", id="an error"),
        pytest.param(200, b"not json", id="no JSON"),
        pytest.param(200, b'{"status":"dancing"}', id="a state that is none"),
        pytest.param(200, b"\xff\xfe\xfd", id="no text"),
        pytest.param(200, b"[" + b" " * MAX_RESPONSE_BYTES + b"]", id="too much of it"),
        pytest.param(200, b"[" * 200_000, id="nesting without end"),
        pytest.param(302, b"", id="a redirect to somewhere else"),
    ],
)
async def test_nonsense_is_no_answer_and_the_next_good_one_counts(
    statuses: AgentStatusCache, agent: FakeAgent, status: int, body: bytes
) -> None:
    async def nonsense(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"Location": "/elsewhere"})

    agent.respond = nonsense
    statuses.watch(POD, agent.address)
    await until(lambda: len(agent.polls) >= 2)
    assert statuses.fact(POD).last_answer is None
    agent.respond = None
    await until(lambda: state(statuses) is AgentState.READY)


async def test_an_agent_that_does_not_hold_its_long_polls_is_polled(
    statuses: AgentStatusCache, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_cache, "PLAIN_POLL_S", 0.2)
    monkeypatch.setattr(status_cache, "QUICK_S", PATIENCE_S)  # on a busy machine every answer may take its time
    times: list[float] = []

    async def hasty(request: web.Request) -> web.Response:
        times.append(time.monotonic())
        agent.say()
        return web.json_response(agent.status)

    agent.respond = hasty
    statuses.watch(POD, agent.address)
    await until(lambda: len(times) > status_cache.QUICK_ANSWERS + 2)
    assert times[-1] - times[-2] >= 0.2


async def test_what_is_packed_is_not_unpacked(statuses: AgentStatusCache, agent: FakeAgent) -> None:
    async def packed(request: web.Request) -> web.Response:
        headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        return web.Response(body=gzip.compress(b'{"status":"ready"}'), headers=headers)

    agent.respond = packed
    statuses.watch(POD, agent.address)
    await until(lambda: len(agent.polls) >= 2)
    assert statuses.fact(POD).last_answer is None


async def test_many_silent_agents_of_one_job_wake_it_no_oftener_than_one(
    statuses: AgentStatusCache, wakes: Wakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_cache, "SILENCE_LIMIT", timedelta(0))
    agent = FakeAgent()
    async with serving(agent):
        address = agent.address
    for number in range(20):
        statuses.watch(f"pod-{number}", address)
    await until(lambda: all(statuses.fact(f"pod-{number}").connection_refused for number in range(20)))
    assert wakes == [JOB]


async def test_an_agent_that_is_not_there_yet_is_tried_again(statuses: AgentStatusCache) -> None:
    agent = FakeAgent()
    async with serving(agent):
        address = agent.address
    statuses.watch(POD, address)
    await until(lambda: statuses.fact(POD).connection_refused)
    assert statuses.fact(POD).trying_since is not None
    assert statuses.fact(POD).last_answer is None


async def test_silence_wakes_the_job_once_it_is_long_enough(
    statuses: AgentStatusCache, wakes: Wakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_cache, "SILENCE_LIMIT", timedelta(milliseconds=50))
    agent = FakeAgent()
    async with serving(agent):
        address = agent.address
    statuses.watch(POD, address)
    await until(lambda: wakes[:1] == [JOB])


async def test_the_newest_checkpoint_of_all_agents_is_handed_on(statuses: AgentStatusCache, agent: FakeAgent) -> None:
    agent.status["progress"] = {"a": {"progressCount": 4, "data": "old"}, "b": {"progressCount": 1}}
    async with serving(FakeAgent()) as other:
        other.status["progress"] = {"a": {"progressCount": 7, "data": "new"}, "c": "nonsense"}
        statuses.watch(POD, agent.address)
        statuses.watch("other", other.address)
        await until(lambda: state(statuses) is not None and statuses.fact("other").state is not None)
        found = statuses.progress([POD, "other", "unknown"])
        statuses.forget("other")
    assert found == {"a": {"progressCount": 7, "data": "new"}, "b": {"progressCount": 1}, "c": "nonsense"}
    assert [checkpoint_step(found[name]) for name in "abc"] == [7, 1, -1]
    assert checkpoint_step({"progressCount": 10**30}) == -1, "beyond all counting"


def saved(step: int, **more: Any) -> dict[str, Any]:
    return {"progressCount": step, "progressReported": True, **more}


async def test_a_pod_that_was_lost_in_a_save_still_tells_what_it_had_completed(
    statuses: AgentStatusCache, agent: FakeAgent
) -> None:
    """All pods would else load the step that it has not written, again and again."""
    series = dict.fromkeys(("run", "elastipod", "long"), saved(200))
    agent.status |= {"generation": 3, "progress": series}

    def has_answered(uid: str) -> bool:
        return statuses.fact(uid).state is not None

    statuses.watch(POD, agent.address)
    for uid, generation, progress in (
        ("lost", 3, {"run": saved(100, data="x"), "elastipod": saved(100), "long": saved(1, data="x" * 1000)}),
        ("lost too", 3, {"run": saved(150)}),
        ("lost before", 2, {"run": saved(50)}),
        ("plain", 3, {"run": {"progressCount": 1}}),
    ):
        async with serving(FakeAgent()) as other:
            other.status |= {"generation": generation, "progress": progress}
            statuses.watch(uid, other.address)
            await until(partial(has_answered, uid))
            statuses.forget(uid)
            assert statuses.progress([uid]) == {}
    await until(lambda: state(statuses) is not None)
    found = statuses.progress([POD], 4)
    assert {name: entry["progressCount"] for name, entry in found.items()} == {
        "run": 100,
        "elastipod": 200,
        "long": 200,
    }
    agent.say(generation=4, progress={"run": saved(300)})
    await until(lambda: statuses.progress([POD], 5)["run"]["progressCount"] == 300)


def shown(agent: FakeAgent, token: str) -> Address:
    """Give the address of an agent whose pod has a token of the previous version."""
    return replace(agent.address, credentials=Credentials(token=token))


async def test_the_token_is_shown_with_every_call(statuses: AgentStatusCache, agent: FakeAgent) -> None:
    agent.token = "abc"
    statuses.watch(POD, shown(agent, "abc"))
    await until(lambda: state(statuses) is AgentState.READY and len(agent.polls) == 2)
    assert set(agent.shown) == {"Bearer abc"}
    assert "abc" not in repr(shown(agent, "abc"))


async def test_who_needs_no_token_is_shown_none(statuses: AgentStatusCache, agent: FakeAgent) -> None:
    statuses.watch(POD, agent.address)
    await until(lambda: state(statuses) is AgentState.READY)
    assert agent.shown[0] is None


async def test_an_agent_that_does_not_know_us_is_told_of_at_once_and_once(
    statuses: AgentStatusCache, agent: FakeAgent, wakes: Wakes, caplog: pytest.LogCaptureFixture
) -> None:
    agent.token = "theirs"
    statuses.watch(POD, shown(agent, "ours"))
    await until(lambda: len(agent.polls) >= 3)
    assert statuses.fact(POD).authentication_failed
    assert wakes == [JOB]
    assert caplog.text.count("HTTP 401") == 1
    assert "ours" not in caplog.text
    agent.token = "ours"
    await until(lambda: state(statuses) is AgentState.READY)
    assert not statuses.fact(POD).authentication_failed


async def test_after_close_nothing_is_left_running(agent: FakeAgent) -> None:
    before = asyncio.all_tasks()
    async with open_session() as session:
        statuses = AgentStatusCache(session, lambda job: None)
        statuses.watch(POD, agent.address)
        polls = asyncio.all_tasks() - before
        assert polls
        await statuses.close()
        assert polls.isdisjoint(asyncio.all_tasks())


def test_addresses_of_both_kinds_make_urls() -> None:
    assert Address(JOB, "10.0.0.1", 8080).url("/status") == "http://10.0.0.1:8080/status"
    assert Address(JOB, "fd00::1", 8080).url("/stop") == "http://[fd00::1]:8080/stop"


@pytest.mark.parametrize("is_long", [True, False], ids=["in a long poll", "between polls"])
async def test_in_a_long_poll_the_last_sign_of_life_of_the_machine_is_an_answer(
    statuses: AgentStatusCache, agent: FakeAgent, is_long: bool
) -> None:
    """Whoever waits for a change hears nothing of the agent, but its kernel confirms that it is there."""
    statuses.watch(POD, agent.address)
    await until(lambda: len(agent.polls) == 2)
    polled = statuses._polled[POD]
    assert polled.connection is not None
    answered = polled.fact.last_answer
    assert answered is not None
    polled.is_long = is_long
    polled.connection.heard_at = lambda: time.monotonic() + 60  # type: ignore[method-assign]
    heard = statuses.fact(POD).last_answer
    assert heard is not None
    assert (heard - answered > timedelta(seconds=30)) is is_long
    polled.connection.heard_at = lambda: time.monotonic() - 3600  # type: ignore[method-assign]
    assert statuses.fact(POD).last_answer == answered, "an older sign takes nothing back"
