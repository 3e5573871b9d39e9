"""The HTTP server by itself: the protocol, and its bounds against clients that are large, slow or many."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.patience import PATIENCE_S

from elastipod_agent.server import http as module
from elastipod_agent.server.http import MAX_HEAD_BYTES, Admission, HttpServer, Request, Upgrade, admit_everybody
from elastipod_agent.server.http_messages import Head, RequestRefused, Response, parse_head

LIMIT = 1000


class Connect:
    """Makes connections to a server, and keeps them open."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []

    @property
    def opened(self) -> int:
        """How many have been made."""
        return len(self.writers)

    async def __call__(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer


async def echo(request: Request) -> Response:
    return Response(200, {"path": request.path, "query": dict(request.query), "body": request.body.decode()})


@asynccontextmanager
async def serving(
    handle: Callable[[Request], Awaitable[Response]] = echo,
    *,
    idle_timeout_s: float = PATIENCE_S,
    max_connections: int = 8,
    patience_s: float = PATIENCE_S,
    admit: Callable[[Head], Admission] = admit_everybody,
    upgrades: Mapping[str, Upgrade] = MappingProxyType({}),
) -> AsyncIterator[Connect]:
    """Serve on a port of the system's choice; gives a function that connects."""
    server = HttpServer(
        handle,
        lambda path: LIMIT,
        lambda status, why: None,
        max_connections=max_connections,
        head_timeout_s=patience_s,
        body_timeout_s=patience_s,
        admit=admit,
        upgrades=upgrades,
        idle_timeout_s=idle_timeout_s,
    )
    connect = Connect(await server.listen("127.0.0.1", 0))
    try:
        yield connect
    finally:
        for writer in connect.writers:
            writer.close()
        await server.close(1.0)


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Read one response."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:-2])
    return int(head[0].split()[1]), headers, await reader.readexactly(int(headers["content-length"]))


async def ask(data: bytes) -> tuple[int, dict[str, str], bytes]:
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(data)
        return await answer(reader)


async def test_one_connection_carries_many_requests() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        for number in range(3):
            writer.write(f"POST /x?a={number}&a=9 HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi".encode())
            status, headers, body = await answer(reader)
            assert (status, headers["connection"]) == (200, "keep-alive")
            assert json.loads(body) == {"path": "/x", "query": {"a": "9"}, "body": "hi"}


async def test_requests_may_come_in_one_piece_or_byte_by_byte() -> None:
    async with serving() as connect:
        reader, writer = await connect()
        one = b"POST /x HTTP/1.1\r\nContent-Length: 2\r\n\r\nhi"
        writer.write(one + one)
        assert (await answer(reader))[0] == (await answer(reader))[0] == 200
        for byte in one:
            writer.write(bytes([byte]))
            await writer.drain()
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        ("GET / HTTP/1.1\r\n\r\n", "keep-alive"),
        ("GET / HTTP/1.1\r\nConnection: close\r\n\r\n", "close"),
        ("GET / HTTP/1.0\r\n\r\n", "close"),
        ("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "keep-alive"),
    ],
)
async def test_connections_are_kept_as_the_client_wishes(head: str, kept: str) -> None:
    assert (await ask(head.encode()))[1]["connection"] == kept


async def test_chunked_bodies_and_expectations() -> None:
    status, _, body = await ask(
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nA: b\r\n\r\n"
    )
    assert (status, json.loads(body)["body"]) == (200, "abcde")
    async with serving() as connect:
        reader, writer = await connect()
        writer.write(b"POST / HTTP/1.1\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await answer(reader))[0] == 200


@pytest.mark.parametrize(
    ("data", "status"),
    [
        pytest.param(b"hello\r\n\r\n", 400, id="no HTTP"),
        pytest.param(b"GET http://x/ HTTP/1.1\r\n\r\n", 400, id="proxy request"),
        pytest.param(b"GET / HTTP/2\r\n\r\n", 400, id="another version"),
        pytest.param(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400, id="header without a name"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, id="negative length"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", 413, id="large body"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 999999999999999\r\n\r\n", 413, id="longest length"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 0999999999999999\r\n\r\n", 400, id="too many digits"),
        pytest.param(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3e9\r\n", 413, id="large chunk"),
        pytest.param(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, id="bad chunk"),
        pytest.param(
            b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, id="two lengths"
        ),
        pytest.param(b"POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501, id="another coding"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 1\r\ncontent-length: 2\r\n\r\n", 400, id="a length twice"),
        pytest.param(b"GET / HTTP/1.1\r\nA: " + b"x" * MAX_HEAD_BYTES * 2, 431, id="large head"),
        pytest.param(b"GET /?" + b"&".join(b"a=1" for _ in range(40)) + b" HTTP/1.1\r\n\r\n", 400, id="many fields"),
    ],
)
async def test_what_cannot_be_read_is_refused_and_the_connection_closed(data: bytes, status: int) -> None:
    code, headers, _ = await ask(data)
    assert (code, headers["connection"]) == (status, "close")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HT", id="in the head"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nab", id="in the body"),
    ],
)
async def test_a_client_that_stalls_is_dropped(data: bytes) -> None:
    async with serving(patience_s=0.2) as connect:
        reader, writer = await connect()
        writer.write(data)
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


async def test_an_idle_connection_is_closed() -> None:
    async with serving(idle_timeout_s=0.1) as connect:
        reader, _ = await connect()
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


async def test_who_asks_takes_the_place_of_who_is_quiet_longest() -> None:
    async with serving(max_connections=2) as connect:
        quiet, held = await connect(), await connect()
        for reader, writer in (quiet, held):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await answer(reader))[0] == 200
        newest = await connect()
        assert await asyncio.wait_for(quiet[0].read(), PATIENCE_S) == b""
        for reader, writer in (newest, held):
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await answer(reader))[0] == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="silent"),
        pytest.param(b"GET / HT", id="slow in the head"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 900\r\n\r\nab", id="slow in the body"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n", id="refused and still there"),
    ],
)
async def test_a_thousand_strangers_do_not_keep_the_operator_out(data: bytes) -> None:
    release = asyncio.Event()

    async def handle(request: Request) -> Response:
        await release.wait()
        return Response(200)

    async with serving(handle, max_connections=8) as connect:
        polling, poll = await connect()
        poll.write(b"GET /status HTTP/1.1\r\n\r\n")
        before = len(os.listdir("/proc/self/fd"))
        most = 0
        for _ in range(20):
            for _ in range(50):
                _, writer = await connect()
                writer.write(data)
            await asyncio.sleep(0)
            ours = len(os.listdir("/proc/self/fd")) - before
            most = max(most, ours - connect.opened)
        asking, ask_writer = await connect()
        ask_writer.write(b"GET /status HTTP/1.1\r\n\r\n")
        release.set()
        assert (await answer(polling))[0] == (await answer(asking))[0] == 200
        assert most <= 70


async def test_where_all_places_are_in_use_the_newest_is_turned_away() -> None:
    release = asyncio.Event()

    async def handle(request: Request) -> Response:
        await release.wait()
        return Response(200)

    async with serving(handle, max_connections=2) as connect:
        held = [await connect(), await connect()]
        for _, writer in held:
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.05)
        assert (await answer((await connect())[0]))[0] == 503
        release.set()
        assert [(await answer(reader))[0] for reader, _ in held] == [200, 200]


class Proving:
    """An upgrade whose caller proves who it is with one byte. leaves: of connections that have."""

    def __init__(self) -> None:
        self.leaves = 0

    async def __call__(self, head: Head, streams: Any, leave_http: Callable[[], None]) -> None:
        reader, writer = streams
        writer.write(b"101\n")
        await reader.readexactly(1)
        leave_http()
        self.leaves += 1
        writer.write(b"proven\n")
        await reader.read()


async def upgraded(connect: Connect) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await connect()
    writer.write(b"GET /upgrade HTTP/1.1\r\n\r\n")
    assert await asyncio.wait_for(reader.readline(), PATIENCE_S) == b"101\n"
    return reader, writer


async def test_who_is_about_to_prove_who_it_is_makes_room_for_nobody() -> None:
    proving = Proving()
    async with serving(max_connections=4, upgrades={"/upgrade": proving}) as connect:
        callers = [await upgraded(connect) for _ in range(2)]
        refused, writer = await connect()
        writer.write(b"GET /upgrade HTTP/1.1\r\n\r\n")
        status, headers, body = await answer(refused)
        assert (status, headers["connection"]) == (503, "close"), "half of the connections are for others"
        assert json.loads(body) == {"detail": "2 connections are being upgraded; ask again"}
        for _ in range(10):
            await connect()
        for reader, writer in callers:
            writer.write(b"!")
            assert await asyncio.wait_for(reader.readline(), PATIENCE_S) == b"proven\n"
        assert proving.leaves == 2
        callers += [await upgraded(connect) for _ in range(2)]


async def test_who_takes_long_to_prove_who_it_is_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "UPGRADE_GRACE_S", 0.0)
    async with serving(max_connections=2, upgrades={"/upgrade": Proving()}) as connect:
        first, _ = await upgraded(connect)
        await upgraded(connect)
        await upgraded(connect)
        assert await asyncio.wait_for(first.read(), PATIENCE_S) == b""


async def test_a_client_that_never_fetches_its_answers_is_dropped_and_holds_no_descriptor() -> None:
    async def handle(request: Request) -> Response:
        return Response(200, "x" * 1_000_000)

    async with serving(handle, patience_s=0.2) as connect:
        before = len(os.listdir("/proc/self/fd"))
        _, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n" * 20)
        end = asyncio.get_running_loop().time() + PATIENCE_S
        while len(os.listdir("/proc/self/fd")) > before + 1:  # the client's own end
            assert asyncio.get_running_loop().time() < end
            await asyncio.sleep(0.01)


async def test_requests_that_come_in_one_piece_do_not_keep_the_event_loop() -> None:
    order: list[str] = []

    async def handle(request: Request) -> Response:
        order.append(request.path)
        return Response(200)

    async with serving(handle) as connect:
        reader, writer = await connect()
        _, other = await connect()
        await asyncio.sleep(0.05)
        writer.write(b"GET /flood HTTP/1.1\r\n\r\n" * 500)
        other.write(b"GET /other HTTP/1.1\r\n\r\n")
        for _ in range(500):
            assert (await answer(reader))[0] == 200
        assert order.index("/other") < 250


async def test_who_may_not_come_in_is_told_so_before_the_body_is_read() -> None:
    asked: list[str] = []

    def admit(head: Head) -> Admission:
        if head.headers.get("x-who") != "friend":
            raise RequestRefused(HTTPStatus.UNAUTHORIZED, "friends only", {"WWW-Authenticate": "Bearer"})
        return Admission()

    async def handle(request: Request) -> Response:
        asked.append(request.path)
        return Response(200)

    async with serving(handle, admit=admit) as connect:
        reader, writer = await connect()
        writer.write(b"POST /stop HTTP/1.1\r\nContent-Length: 500\r\nX-Who: stranger\r\n\r\n")
        status, headers, body = await answer(reader)
        assert (status, headers["www-authenticate"], headers["connection"]) == (401, "bearer", "close")
        assert json.loads(body) == {"detail": "friends only"}
        reader, writer = await connect()
        writer.write(b"POST /start HTTP/1.1\r\nX-Who: friend\r\n\r\n")
        assert (await answer(reader))[0] == 200
    assert asked == ["/start"]


async def test_raw_bodies_go_out_as_they_are() -> None:
    async def handle(request: Request) -> Response:
        return Response(200, b"a 1\n", {"Content-Type": "text/plain"})

    async with serving(handle) as connect:
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        status, headers, body = await answer(reader)
        assert (status, headers["content-type"], body) == (200, "text/plain", b"a 1\n")


async def test_a_slow_answer_holds_nobody_else_up_and_closing_lets_it_out() -> None:
    release = asyncio.Event()

    async def handle(request: Request) -> Response:
        if request.path == "/slow":
            await release.wait()
        return Response(200)

    async with serving(handle) as connect:
        slow, slow_writer = await connect()
        slow_writer.write(b"GET /slow HTTP/1.1\r\n\r\n")
        quick, quick_writer = await connect()
        quick_writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await answer(quick) == (200, {"content-length": "0", "connection": "keep-alive"}, b"")
        release.set()
        assert (await answer(slow))[0] == 200


@given(st.binary(max_size=300))
def test_any_head_is_parsed_or_refused(data: bytes) -> None:
    try:
        head = parse_head(data + b"\r\n\r\n")
    except RequestRefused:
        return
    assert head.target.startswith("/")


async def test_a_handler_that_fails_is_answered_with_500() -> None:
    async def handle(request: Request) -> Response:
        raise RuntimeError("ours")

    async with serving(handle) as connect:
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await answer(reader))[0] == 500


def ipv6_is_usable() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return socket.has_dualstack_ipv6()


@asynccontextmanager
async def serving_everywhere(port: int = 0) -> AsyncIterator[int]:
    server = HttpServer(echo, lambda path: LIMIT, lambda status, why: None)
    chosen = await server.listen("", port)
    try:
        yield chosen
    finally:
        await server.close(1.0)


async def status_at(host: str, port: int) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(b"GET / HTTP/1.1\r\n\r\n")
    try:
        return (await answer(reader))[0]
    finally:
        writer.close()


@pytest.mark.skipif(not ipv6_is_usable(), reason="this machine has no IPv6")
async def test_without_a_host_ipv4_and_ipv6_are_served_at_one_port() -> None:
    async with serving_everywhere() as port:
        assert [await status_at(host, port) for host in ("127.0.0.1", "::1")] == [200, 200]


@pytest.mark.parametrize("number", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, None])
async def test_without_a_host_and_without_ipv6_ipv4_is_served(
    number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the system has no sockets for both; else: it has, but IPv6 is switched off."""
    create = socket.create_server

    def without_ipv6(address: tuple[str, int], *, family: int = socket.AF_INET, **options: Any) -> socket.socket:
        if family == socket.AF_INET6:
            assert number is not None, "it was asked before"
            raise OSError(number, os.strerror(number))
        return create(address, **options)

    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: number is not None)
    monkeypatch.setattr(socket, "create_server", without_ipv6)
    async with serving_everywhere() as port:
        assert await status_at("127.0.0.1", port) == 200


async def test_without_a_host_a_port_that_is_taken_in_one_of_both_is_taken() -> None:
    with socket.create_server(("0.0.0.0", 0)) as other, pytest.raises(OSError, match=str(errno.EADDRINUSE)):
        async with serving_everywhere(other.getsockname()[1]):
            pass
