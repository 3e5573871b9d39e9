"""The operator's side of authentication, against the agent's own server and against others that answer at its address."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from aiohttp import web
from tests.unit.agents.fake_agent import JOB, FakeAgent, serving, until

from elastipod_agent import authentication as agent_side
from elastipod_agent.server.http import HttpServer, Request
from elastipod_agent.server.http_messages import Response
from elastipod_operator.agents import authentication
from elastipod_operator.agents.authentication import AuthenticationFailed, Authenticator, Authenticators, Credentials
from elastipod_operator.agents.commands import Command, CommandSender
from elastipod_operator.agents.polled_agent import Address
from elastipod_operator.agents.status_cache import AgentStatusCache
from elastipod_operator.agents.status_requests import open_session
from elastipod_operator.core.snapshot import AgentState

POD, NAME, KEY, TOKEN = "pod-uid", "job-workers-0", "5" * 64, "70ce" * 16
HELD = Credentials(NAME, KEY, TOKEN)


class Agent:
    """The agent's own HTTP server, with the answers of a test."""

    def __init__(self, held: agent_side.Credentials, max_nonces: int = agent_side.MAX_NONCES) -> None:
        self.held, self.max_nonces = held, max_nonces
        self.status = {"status": "ready", "protocol": 1, "version": 1, "generation": 0}
        self.posts: list[tuple[str, bytes]] = []
        self.polls = 0
        self.refusals: list[int] = []
        self.port = 0
        self._server: HttpServer | None = None

    async def handle(self, request: Request) -> Response:
        if request.method == "POST":
            self.posts.append((request.path, request.body))
            return Response(200)
        self.polls += 1
        self.status["version"] = self.polls + 1
        return Response(200, self.status)

    async def start(self) -> None:
        """Begin to serve, as a new process with a new challenge would."""
        guard = agent_side.MacGuard(self.held, max_nonces=self.max_nonces)
        admit = guard.admit if self.held.key else agent_side.admission_of(self.held)
        self._server = HttpServer(
            self.handle, lambda path: 1 << 20, lambda status, why: self.refusals.append(status), admit=admit
        )
        self.port = await self._server.listen("127.0.0.1", self.port)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close(0.5)
            self._server = None


@contextlib.asynccontextmanager
async def running(agent: Agent) -> AsyncIterator[Agent]:
    await agent.start()
    try:
        yield agent
    finally:
        await agent.stop()


@pytest.fixture
def known() -> Authenticators:
    """What an AgentStatusCache and a CommandSender share."""
    return Authenticators()


@pytest.fixture
async def statuses(known: Authenticators) -> AsyncIterator[AgentStatusCache]:
    """A status cache that watches nobody yet."""
    async with open_session() as session:
        statuses = AgentStatusCache(session, lambda job: None, known)
        yield statuses
        await statuses.close()


@pytest.fixture
async def command_sender(known: Authenticators) -> AsyncIterator[CommandSender]:
    """A command sender with a session of its own."""
    async with open_session() as session:
        yield CommandSender(session, known)


def stop_at(port: int, credentials: Credentials, generation: int = 3) -> Command:
    address = Address(JOB, "127.0.0.1", port, credentials)
    return Command(POD, address, "/stop", {"generation": generation}, ("stop", generation))


def our_agent(key: str = KEY, pod: str = NAME, **options: int) -> Agent:
    return Agent(agent_side.Credentials(key, TOKEN, pod), **options)


def test_both_sides_sign_alike() -> None:
    """They share no code, because the operator's image has no agent and the agent's none of the operator."""
    held = agent_side.Credentials(KEY, TOKEN, NAME)
    assert (authentication.SCHEME, authentication.ANSWER_HEADER) == (agent_side.SCHEME, agent_side.ANSWER_HEADER)
    ours = authentication._mac(KEY, authentication._NAMES[0], NAME, "c1", "a2", "POST", "/stop?x=1", "d3")
    assert ours == agent_side.request_mac(held, "c1", "a2", "POST", "/stop?x=1", "d3")
    ours = authentication._mac(KEY, authentication._NAMES[1], NAME, "c1", "a2", "409", "d3")
    assert ours == agent_side.answer_mac(held, "c1", "a2", 409, "d3")


async def test_polls_and_commands_are_signed_and_taken(
    statuses: AgentStatusCache, command_sender: CommandSender
) -> None:
    async with running(our_agent()) as agent:
        address = Address(JOB, "127.0.0.1", agent.port, HELD)
        statuses.watch(POD, address)
        await until(lambda: statuses.fact(POD).state is AgentState.READY and agent.polls >= 3)
        assert await command_sender.send([stop_at(agent.port, HELD)]) == []
        assert [(path, json.loads(body)) for path, body in agent.posts] == [("/stop", {"generation": 3})]
        assert not statuses.fact(POD).authentication_failed
        assert agent.refusals == [401], "the very first call asks for the challenge"


async def test_an_agent_that_restarts_is_called_with_its_new_challenge(command_sender: CommandSender) -> None:
    async with running(our_agent()) as agent:
        assert await command_sender.send([stop_at(agent.port, HELD, 1)]) == []
        await agent.stop()
        await agent.start()
        assert await command_sender.send([stop_at(agent.port, HELD, 2)]) == []
        assert len(agent.posts) == 2


async def test_calls_at_once_survive_a_change_of_the_challenge(command_sender: CommandSender) -> None:
    async with running(our_agent(max_nonces=4)) as agent:
        for generation in range(12):
            assert await command_sender.send([stop_at(agent.port, HELD, generation)]) == []
        assert len(agent.posts) == 12


@pytest.mark.parametrize(
    ("key", "pod"), [("6" * 64, NAME), (KEY, "job-workers-1")], ids=["another key", "the agent of another pod"]
)
async def test_an_agent_with_other_credentials_is_told_of(
    statuses: AgentStatusCache, command_sender: CommandSender, key: str, pod: str
) -> None:
    async with running(our_agent(key, pod)) as agent:
        address = Address(JOB, "127.0.0.1", agent.port, HELD)
        statuses.watch(POD, address)
        await until(lambda: statuses.fact(POD).authentication_failed)
        (problem,) = await command_sender.send([stop_at(agent.port, HELD)])
        assert "rejected the operator's credentials (HTTP 401)" in problem
        assert agent.posts == []


class Impostor(FakeAgent):
    """Answers at a pod's address, notes what it is shown, and says what a test has it say."""

    def __init__(self, challenge: str, status: int = 401, scheme: str = "") -> None:
        super().__init__()
        self.seen = ""
        self._status, self._ask = status, scheme or f'{authentication.SCHEME} challenge="{challenge}"'

    async def get(self, request: web.Request) -> web.StreamResponse:
        self.seen += f"{request.path_qs} {dict(request.headers)}"
        asked = {"WWW-Authenticate": self._ask} if self._status == 401 else {}
        return web.json_response(self.status | {"status": "completed"}, status=self._status, headers=asked)

    async def post(self, request: web.Request) -> web.StreamResponse:
        self.seen += await request.text()
        return await self.get(request)


@pytest.mark.parametrize(
    ("status", "scheme"),
    [
        pytest.param(200, "", id="as an agent that asks for nothing"),
        pytest.param(401, "Bearer", id="as an agent of the previous version"),
        pytest.param(401, "", id="with a challenge of its own"),
    ],
)
async def test_who_takes_a_proven_agents_address_learns_and_tells_nothing(
    known: Authenticators, command_sender: CommandSender, status: int, scheme: str
) -> None:
    held = known.of(HELD)  # as by its polls
    async with running(our_agent()) as agent:
        assert await command_sender.send([stop_at(agent.port, HELD, 1)]) == []
    async with serving(Impostor("c" * 32, status, scheme)) as impostor:
        (problem,) = await command_sender.send([stop_at(impostor.address.port, HELD, 2)])
        assert "AuthenticationFailed" in problem
        assert isinstance(impostor, Impostor)
        assert KEY not in impostor.seen
        assert TOKEN not in impostor.seen
    assert held is known.of(HELD)


async def test_what_an_impostor_is_sent_is_of_no_use_with_another_agent(command_sender: CommandSender) -> None:
    """It hands on the challenge of another pod's agent, and what the operator signs with it."""
    async with running(our_agent(pod="job-workers-1")) as other:
        answer = await command_sender.send([stop_at(other.port, Credentials("job-workers-1", KEY), 1)])
        assert answer == []
        challenge = agent_side.challenge_in(
            (await _refusal(other.port))["WWW-Authenticate"],
        )
        known = Authenticator(HELD)
        known.is_to_repeat(
            known.sign("POST", "/stop"),
            authentication.Response(401, {"www-authenticate": f'{authentication.SCHEME} challenge="{challenge}"'}, b""),
        )
        relayed = known.sign("POST", "/stop").headers
        async with (
            open_session() as session,
            session.post(f"http://127.0.0.1:{other.port}/stop", headers=relayed) as reply,
        ):
            assert reply.status == 401
        assert len(other.posts) == 1


async def _refusal(port: int) -> dict[str, str]:
    async with open_session() as session, session.get(f"http://127.0.0.1:{port}/status") as reply:
        return dict(reply.headers)


def test_an_answer_without_or_with_a_wrong_mac_is_refused() -> None:
    known = Authenticator(HELD)
    challenge = authentication.Response(401, {"www-authenticate": f'{authentication.SCHEME} challenge="ab"'}, b"")
    assert known.is_to_repeat(known.sign("GET", "/status"), challenge)
    call = known.sign("GET", "/status")
    wrong = {"elastipod-answer": f"challenge=ab, mac={'0' * 64}"}
    for headers in ({}, wrong):
        with pytest.raises(AuthenticationFailed, match="has no valid MAC"):
            known.check(call, authentication.Response(200, headers, b"{}"))


async def test_an_agent_of_the_previous_version_is_shown_the_token(statuses: AgentStatusCache) -> None:
    async with running(Agent(agent_side.Credentials(token=TOKEN))) as agent:
        statuses.watch(POD, Address(JOB, "127.0.0.1", agent.port, HELD))
        await until(lambda: statuses.fact(POD).state is AgentState.READY and agent.polls >= 2)


async def test_a_pod_of_the_previous_operator_is_shown_the_token_at_once(statuses: AgentStatusCache) -> None:
    async with running(Agent(agent_side.Credentials(token=TOKEN))) as agent:
        statuses.watch(POD, Address(JOB, "127.0.0.1", agent.port, replace(HELD, key="")))
        await until(lambda: statuses.fact(POD).state is AgentState.READY)
        assert agent.refusals == []


def test_an_agent_has_one_authenticator_while_anyone_uses_it() -> None:
    known = Authenticators()
    first = known.of(HELD)
    assert known.of(HELD) is first
    assert known.of(replace(HELD, pod="job-workers-1")) is not first
    kept = weakref.ref(first)
    del first
    assert kept() is None


async def test_a_call_to_an_agent_whose_pod_is_gone_leaves_nothing_behind(
    known: Authenticators, statuses: AgentStatusCache, command_sender: CommandSender
) -> None:
    """As the shutdown that follows the deletion of a pod by force: no other event of that pod comes."""
    async with running(our_agent()) as agent:
        statuses.watch(POD, Address(JOB, "127.0.0.1", agent.port, HELD))
        await until(lambda: statuses.fact(POD).state is AgentState.READY)
        polled = weakref.ref(known.of(HELD))
        assert polled() is not None, "what the agent asks for is remembered between the polls"
        statuses.forget(POD)
        assert await command_sender.send([stop_at(agent.port, HELD)]) == []
        await until(lambda: not known._known)
