"""Long polls against a server of a few lines that answers whatever the test wants, in pieces of any size."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from aiohttp import web
from tests import web_servers
from tests.unit.agents.fake_agent import JOB, FakeAgent, serving, until
from tests.unit.operator_shell.virtual_time import run_in_virtual_time

from elastipod_operator import clock
from elastipod_operator.agents.polled_agent import Address, PolledAgent
from elastipod_operator.agents.polls import (
    KEPT_HEADERS,
    LAST_DATA_AND_ACK,
    ConnectFailed,
    PollConnection,
    TooLarge,
    UnsupportedResponse,
    _read_head,
)
from elastipod_operator.agents.status_cache import AgentStatusCache
from elastipod_operator.agents.status_requests import ReadTooLate, StatusRequests, in_time, open_session
from elastipod_operator.core.snapshot import ObservedAgent

GOOD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@dataclass
class Server:
    """Gives each request the next answer; None: no answer at all."""

    answers: list[list[bytes] | None]
    requests: list[bytes] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                if answer is None:
                    continue
                for piece in answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if not answer:
                    break
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def asked(
    *answers: list[bytes] | None,
) -> AsyncIterator[tuple[Server, PollConnection]]:
    """Give a server with these answers and a connection for it."""
    it = Server(list(answers))
    server = await asyncio.start_server(it.serve, "127.0.0.1", 0)
    it.port = server.sockets[0].getsockname()[1]
    connection = PollConnection("127.0.0.1", it.port, max_bytes=100)
    try:
        yield it, connection
    finally:
        connection.close()
        await web_servers.accept_no_more(server)
        server.close()
        await server.wait_closed()


async def ask(connection: PollConnection, limit_s: float = 5.0, **headers: str) -> tuple[int, bytes]:
    reply = await connection.ask("/status?after=1&wait=3", 2.0, limit_s, headers)
    return reply.status, reply.body


async def test_polls_share_one_connection() -> None:
    async with asked([GOOD], [GOOD]) as (server, connection):
        assert [await ask(connection), await ask(connection, Authorization="a b")] == [(200, b"{}")] * 2
    assert server.connections == 1
    lines = server.requests[1].split(b"\r\n")
    assert lines[0] == b"GET /status?after=1&wait=3 HTTP/1.1"
    assert {b"Host: 127.0.0.1:%d" % server.port, b"Accept-Encoding: identity", b"Authorization: a b"} <= {*lines}


@pytest.mark.parametrize("size", [1, 7, 40])
async def test_an_answer_may_come_in_pieces(size: int) -> None:
    async with asked([GOOD[at : at + size] for at in range(0, len(GOOD), size)]) as (_, connection):
        assert await ask(connection) == (200, b"{}")


async def test_any_status_is_given_to_the_caller() -> None:
    async with asked([b"HTTP/1.1 401 Who\r\ncontent-length:0\r\n\r\n"]) as (_, connection):
        assert await ask(connection) == (401, b"")


async def test_the_headers_of_authentication_are_given_to_the_caller() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nElastipod-Answer: mac=1\r\nWWW-Authenticate: Some x\r\nServer: s\r\n\r\n"
    async with asked([head]) as (_, connection):
        reply = await connection.ask("/status", 2.0, 5.0, {})
    assert reply.headers == {"elastipod-answer": "mac=1", "www-authenticate": "Some x"}


async def test_a_connection_that_the_agent_ends_is_made_anew() -> None:
    closing = GOOD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    async with asked([closing], [GOOD]) as (server, connection):
        assert [await ask(connection), await ask(connection)] == [(200, b"{}")] * 2
    assert server.connections == 2


async def test_an_agent_that_leaves_without_an_answer_is_no_answer() -> None:
    async with asked([], [GOOD]) as (_, connection):
        with pytest.raises(ConnectionResetError):
            await ask(connection)
        assert await ask(connection) == (200, b"{}")


async def test_an_agent_that_does_not_answer_in_time_is_no_answer() -> None:
    async with asked(None, [GOOD]) as (server, connection):
        with pytest.raises(TimeoutError):
            await ask(connection, limit_s=0.02)
        assert await ask(connection) == (200, b"{}")
    assert server.connections == 2


@pytest.mark.parametrize(("read_after_s", "is_news"), [(3.5, True), (60.0, False)])
def test_an_answer_that_is_read_long_after_it_came_is_no_answer(read_after_s: float, is_news: bool) -> None:
    """The operator stood still meanwhile, and another one may have gone on."""

    async def answer() -> str:
        await asyncio.sleep(read_after_s)
        return "ready"

    if is_news:
        assert run_in_virtual_time(in_time(answer(), 3.0)) == "ready"
        return
    with pytest.raises(TimeoutError, match="read too late"):
        run_in_virtual_time(in_time(answer(), 3.0))


def test_of_a_long_poll_that_is_read_too_late_the_last_sign_of_life_counts() -> None:
    """The machine was there all the time: a pause of the operator must not make its agents silent."""
    connection = mock.Mock(
        heard_at=lambda: time.monotonic() - 4, ask=lambda *_: asyncio.sleep(46, mock.Mock(status=200))
    )
    plain = mock.Mock(exchange=lambda _method, _target, _body, send: send({}))
    polled = PolledAgent(Address(JOB, "10.0.0.1", 8080), plain, version=1, connection=connection)
    polled.fact = ObservedAgent(last_answer=clock.now() - timedelta(seconds=46))
    requests = StatusRequests(mock.Mock(), mock.Mock())
    with pytest.raises(ReadTooLate):
        run_in_virtual_time(requests.ask(polled, lambda _: 40.0))
    assert polled.fact.last_answer is not None
    assert clock.now() - polled.fact.last_answer < timedelta(seconds=10)


async def test_a_late_timer_of_an_earlier_poll_ends_no_later_one() -> None:
    async with asked([GOOD], [GOOD[:9], b"", GOOD[9:]]) as (_, connection):
        await ask(connection, limit_s=0.02)
        await until(lambda: connection._timer is None)
        assert await ask(connection) == (200, b"{}")


async def test_where_nobody_listens_the_connection_fails() -> None:
    async with asked() as (server, _):
        pass
    connection = PollConnection("127.0.0.1", server.port, 100)
    with pytest.raises(ConnectFailed):
        await ask(connection)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            UnsupportedResponse,
            id="chunks",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", UnsupportedResponse, id="packed"
        ),
        pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", UnsupportedResponse, id="an old server"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", UnsupportedResponse, id="no length"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n{}", UnsupportedResponse, id="a length below nothing"
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
            UnsupportedResponse,
            id="two lengths",
        ),
        pytest.param(GOOD + b"{}", UnsupportedResponse, id="more than was said"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n", TooLarge, id="too large a body"),
        pytest.param(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 20_000, TooLarge, id="too large a head"),
    ],
)
async def test_what_is_not_understood_is_refused_and_the_connection_dropped(
    answer: bytes, error: type[Exception]
) -> None:
    async with asked([answer], [GOOD]) as (server, connection):
        with pytest.raises(error):
            await ask(connection)
        assert await ask(connection) == (200, b"{}")
    assert server.connections == 2


async def test_the_board_asks_who_answers_in_an_unusual_way_with_the_general_client() -> None:
    wakes: list[str] = []
    chunked = FakeAgent()

    async def in_chunks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(json.dumps(chunked.status).encode())
        await response.write_eof()
        return response

    chunked.respond = in_chunks
    async with serving(chunked), open_session() as session:
        statuses = AgentStatusCache(session, wakes.append)
        statuses.watch("pod", chunked.address)
        await until(lambda: len(chunked.polls) >= 3)  # the first, the one that was not understood, and it again
        chunked.status = {**chunked.status, "version": 9, "status": "running", "generation": 4}
        await until(lambda: statuses.fact("pod").generation == 4)
        await statuses.close()
    assert wakes == [JOB, JOB]


async def test_what_came_of_an_answer_is_counted_until_it_is_whole_and_bounded() -> None:
    held: list[int] = []

    def hold(more: int) -> bool:
        held.append(more)
        return sum(held) <= 80

    body = b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n"
    whole = [body, b"x" * 10, b"x" * 50]
    broken = [body, b"x" * 45, b"x" * 14, b""]
    async with asked(whole, broken) as (server, connection):
        connection._hold = hold
        assert (await connection.ask("/status", 2, 2, {})).body == b"x" * 60
        assert sum(held) == 0
        held.clear()
        with pytest.raises(TooLarge, match="too many large responses"):
            await connection.ask("/status", 2, 2, {})
        held.pop()  # the one that was refused
        assert sum(h for h in held if h > 0) <= 80
        assert server.requests


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([b"content-length: 7"], (200, 7, True, {})),
        ([b"Content-Length:7", b"Connection: keep-alive"], (200, 7, True, {})),
        ([b"Content-Length: 0", b"CONNECTION: Close "], (200, 0, False, {})),
        ([b"X-Other: a:b", b"Content-Length: 7", b"Date: now"], (200, 7, True, {})),
    ],
)
def test_the_head_of_an_answer(lines: list[bytes], found: tuple[int, int, bool, dict[str, str]]) -> None:
    assert _read_head(b"\r\n".join([b"HTTP/1.1 200 OK", *lines])) == found


def test_headers_that_are_kept_come_with_their_names_in_small_letters() -> None:
    names = sorted(KEPT_HEADERS)
    lines = [name.upper() + b":  caf\xe9 " for name in names]
    head = b"\r\n".join([b"HTTP/1.1 503 Busy", b"Content-Length: 1", *lines])
    assert _read_head(head) == (503, 1, True, {name.decode(): "café" for name in names})


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"HTTP/1.0 200 OK\r\nContent-Length: 1", "the response is not HTTP/1.1"),
        (b"HTTP/1.1 200 OK", "the response has no Content-Length"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1",
            "Content-Length is not a number, or there are two",
        ),
        (b"HTTP/1.1 200 OK\r\nContent-Length: +1", "Content-Length is not a number, or there are two"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked", "the response has transfer-encoding"),
    ],
)
def test_a_head_that_is_not_understood_says_why(head: bytes, said: str) -> None:
    with pytest.raises(UnsupportedResponse) as caught:
        _read_head(head)
    assert str(caught.value) == said


class Kernel:
    """What a connection asks its socket. told: milliseconds since data and since an acknowledgement; None: it cannot be asked."""

    def __init__(self, told: tuple[int, int] | None) -> None:
        self.told = told

    def get_extra_info(self, name: str) -> Kernel:
        assert name == "socket"
        return self

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option, size) == (socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_AND_ACK.size)
        if self.told is None:
            raise OSError("closed")
        return LAST_DATA_AND_ACK.pack(*self.told)

    def abort(self) -> None:
        """Be closed."""


async def test_the_last_sign_of_the_machine_is_known_until_a_newer_one() -> None:
    connection = PollConnection("127.0.0.1", 1, max_bytes=100)
    assert connection.heard_at() is None
    for told, ago_s in (((9000, 4000), 4.0), ((2000, 7000), 2.0)):
        kernel: Any = Kernel(told)
        connection._transport = kernel
        heard = connection.heard_at()
        assert heard is not None
        assert asyncio.get_running_loop().time() - heard == pytest.approx(ago_s, abs=0.5)
    kernel.told = None
    assert connection.heard_at() == heard
    connection.close()
    assert connection.heard_at() == heard
