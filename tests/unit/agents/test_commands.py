"""Commands to agents: each once, and what fails is said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import aiohttp
import pytest
from aiohttp import web
from tests.unit.agents.fake_agent import FakeAgent, serving

from elastipod_operator.agents import commands as commands_module
from elastipod_operator.agents.authentication import Credentials
from elastipod_operator.agents.commands import Command, CommandSender


@pytest.fixture
async def agent() -> AsyncIterator[FakeAgent]:
    """An agent that serves."""
    async with serving(FakeAgent()) as agent:
        yield agent


@pytest.fixture
async def command_sender() -> AsyncIterator[CommandSender]:
    """A command sender with a session of its own."""
    async with aiohttp.ClientSession() as session:
        yield CommandSender(session)


def stop(agent: FakeAgent, generation: int = 3) -> Command:
    return Command("pod", agent.address, "/stop", {"generation": generation}, ("stop", generation))


async def test_a_command_arrives_with_its_body(command_sender: CommandSender, agent: FakeAgent) -> None:
    assert (
        await command_sender.send([stop(agent), replace(stop(agent), path="/shutdown", body=None, key=("shutdown",))])
        == []
    )
    assert sorted(agent.posts) == [("/shutdown", None), ("/stop", {"generation": 3})]


async def test_a_command_shows_the_token(command_sender: CommandSender, agent: FakeAgent) -> None:
    agent.token = "abc"
    (problem,) = await command_sender.send([stop(agent)])
    assert "rejected the operator's credentials (HTTP 401)" in problem
    address = replace(agent.address, credentials=Credentials(token="abc"))
    assert await command_sender.send([replace(stop(agent), address=address)]) == []
    assert (agent.shown, len(agent.posts)) == ([None, "Bearer abc"], 1)


async def test_a_command_that_was_taken_is_not_sent_again_while_it_works(
    command_sender: CommandSender, agent: FakeAgent
) -> None:
    await command_sender.send([stop(agent)])
    await command_sender.send([stop(agent)])
    assert len(agent.posts) == 1
    await command_sender.send([stop(agent, generation=4)])
    await command_sender.send([replace(stop(agent), pod_uid="other")])
    assert len(agent.posts) == 3


async def test_a_command_is_sent_again_when_nothing_came_of_it(
    command_sender: CommandSender, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands_module, "SETTLE_S", 0.0)
    await command_sender.send([stop(agent)])
    await command_sender.send([stop(agent)])
    assert len(agent.posts) == 2


async def test_a_refusal_as_outdated_is_no_problem_and_is_not_remembered(
    command_sender: CommandSender, agent: FakeAgent
) -> None:
    agent.post_code = 409
    assert await command_sender.send([stop(agent)]) == []
    await command_sender.send([stop(agent)])
    assert len(agent.posts) == 2


async def test_an_error_is_told_and_tried_again(command_sender: CommandSender, agent: FakeAgent) -> None:
    agent.post_code = 500
    (problem,) = await command_sender.send([stop(agent)])
    assert "/stop was answered with HTTP 500" in problem
    agent.post_code = 200
    assert await command_sender.send([stop(agent)]) == []
    assert len(agent.posts) == 2


async def test_a_command_is_not_carried_elsewhere(command_sender: CommandSender, agent: FakeAgent) -> None:
    """Nor is the token in it: whoever answers in a pod could have another job's agent called otherwise."""

    class Elsewhere(FakeAgent):
        async def post(self, request: web.Request) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": agent.address.url("/stop")})

    async with serving(Elsewhere()) as stranger:
        (problem,) = await command_sender.send([stop(stranger)])
    assert "/stop was answered with HTTP 307" in problem
    assert agent.posts == []


async def test_an_agent_that_is_gone_is_told_of(command_sender: CommandSender) -> None:
    agent = FakeAgent()
    async with serving(agent):
        command = stop(agent)
    (problem,) = await command_sender.send([command])
    assert problem.startswith(f"POST {command.address.url('/stop')} failed: ClientConnectorError")
