"""A small HTTP/1.1 server: JSON requests and answers, keep-alive, and a limit on everything that a client can send or hold.

A head has at most 16 KiB, a body as much as its route allows, and there are at most 128 connections. A client that is slower than the
time-outs is dropped. No connection waits for another one or for the workers. If all connections are in use, a new one replaces the one
that has been idle longest, so that a client that only holds connections open cannot keep the operator out. A connection that is upgraded to
another protocol is no longer among them once its caller has proven who it is. It has a second for that in which it makes room for nobody,
and at most half of all connections are in that second: further callers are asked to come again before they are told to go on.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from elastipod_agent.server.http_messages import (
    Head,
    RequestRefused,
    Response,
    content_length,
    parse_head,
    parse_target,
)

MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 128
MAX_LARGE_BODIES = 4  # bodies of more than LARGE_BODY_BYTES in memory at the same time
LARGE_BODY_BYTES = 256 * 1024
HEAD_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 30.0
IDLE_TIMEOUT_S = 75.0
UPGRADE_GRACE_S = 1.0
_LINGER_S = 2.0
_BACKLOG = 1024  # of callers whom the kernel has connected; the ranks of a large job come all at once
_LINGER_BYTES = 16 * 1024 * 1024
_CLOSE_TIMEOUT_S = 2.0  # for a client to read the rest of an answer before its connection is closed


@dataclass(frozen=True, slots=True)
class Request:
    """One request. body: as received."""

    method: str
    path: str
    query: Mapping[str, str]
    body: bytes = b""


class Admission:
    """How a request was admitted. The base class accepts any body and adds nothing to the answer."""

    __slots__ = ()

    def check_body(self, body: bytes) -> None:
        """Raise Refused for a body that the caller did not authenticate."""

    def answer_headers(self, status: int, body: bytes) -> Mapping[str, str]:
        """Give the headers that authenticate the answer to the caller."""
        return {}


def admit_everybody(head: Head) -> Admission:
    """Admit every request."""
    return Admission()


Upgrade = Callable[[Head, tuple[asyncio.StreamReader, asyncio.StreamWriter], Callable[[], None]], Awaitable[None]]
"""Takes over a connection to its end. It authenticates the caller itself; the third argument, called once it has, takes the connection out
of the count of those that HTTP may have. Raises RequestRefused as long as nothing has been answered."""


class HttpServer:
    """Serves `handle` at one address. body_limit: path -> size limit of its bodies in bytes.

    admit: called with the head of a request before its body is read; raises RequestRefused for a caller that is not allowed.
    upgrades: path -> what takes over connections that ask for it.
    """

    def __init__(
        self,
        handle: Callable[[Request], Awaitable[Response]],
        body_limit: Callable[[str], int],
        log_refusal: Callable[[int, str], None],
        *,
        admit: Callable[[Head], Admission] = admit_everybody,
        upgrades: Mapping[str, Upgrade] = MappingProxyType({}),
        max_connections: int = MAX_CONNECTIONS,
        head_timeout_s: float = HEAD_TIMEOUT_S,
        body_timeout_s: float = BODY_TIMEOUT_S,
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self._handle = handle
        self._body_limit = body_limit
        self._log_refusal = log_refusal
        self._admit = admit
        self._upgrades = upgrades
        self._max_connections = max_connections
        self._head_timeout_s = head_timeout_s
        self._body_timeout_s = body_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)
        self._connections: dict[asyncio.Task[None], None] = {}  # idle longest first
        self._answering: set[asyncio.Task[None]] = set()
        self._upgrading: dict[asyncio.Task[None], float] = {}  # since when, until the caller has proven who it is
        self._server: asyncio.Server | None = None
        self._is_closing = False

    async def listen(self, host: str, port: int) -> int:
        """Start to serve; gives the port, which the system chooses for 0. host: "" for all addresses, of IPv4 and IPv6.

        Raises OSError if the port is in use, and socket.gaierror if the host has no address.
        """
        place: dict[str, Any] = {"host": host, "port": port} if host else {"sock": _open_to_all(port)}
        try:
            self._server = await asyncio.start_server(self._serve, **place, limit=MAX_HEAD_BYTES, backlog=_BACKLOG)
        except UnicodeError as error:  # of the codec for names, before anybody is asked
            why = "the name has an empty part, or one of more than 63 characters"
            raise socket.gaierror(socket.EAI_NONAME, why) from error
        chosen: int = self._server.sockets[0].getsockname()[1]
        return chosen

    async def close(self, timeout_s: float) -> None:
        """Stop listening, wait at most this long for pending answers, then drop all connections."""
        self._is_closing = True
        assert self._server is not None
        self._server.close()
        if self._answering:
            await asyncio.wait(list(self._answering), timeout=timeout_s)
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        if connections:
            await asyncio.wait(connections, timeout=1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        writer.transport.set_write_buffer_limits(high=0)  # at most one answer waits for a client
        try:
            if not self._has_room():
                full = Response(HTTPStatus.SERVICE_UNAVAILABLE, {"detail": "too many connections"})
                await self._send(writer, full, False, Admission())
                return
            self._connections[task] = None
            while not self._is_closing and await self._exchange(reader, writer, task):
                self._connections[task] = self._connections.pop(task, None)
                await asyncio.sleep(0)  # pipelined requests must not monopolize the event loop
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError):
            pass  # the client left or was too slow: there is nothing to answer
        except asyncio.CancelledError:
            pass  # by close(), or to make room for another connection; the task ends here
        finally:
            self._answering.discard(task)
            self._upgrading.pop(task, None)
            await _close_connection(writer)
            self._connections.pop(task, None)

    def _has_room(self) -> bool:
        """Tell whether one more connection can be served; closes the one that is idle longest if necessary."""
        if len(self._connections) < self._max_connections:
            return True
        in_use = {*self._answering, *self._lately_upgrading()}
        quiet = next((task for task in self._connections if task not in in_use), None)
        if quiet is None:
            return False
        del self._connections[quiet]
        quiet.cancel()
        return True

    def _lately_upgrading(self) -> list[asyncio.Task[None]]:
        """Give the connections whose callers have been told to go on, and have not had the time to prove who they are."""
        grace_began = asyncio.get_running_loop().time() - UPGRADE_GRACE_S
        return [task for task, since in self._upgrading.items() if since > grace_began]

    async def _upgrade(
        self, upgrade: Upgrade, head: Head, streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    ) -> None:
        """Hand a connection over, to its end. Raises RequestRefused where too many are being handed over."""
        if (num_upgrading := len(self._lately_upgrading())) >= max(1, self._max_connections // 2):
            raise RequestRefused(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{num_upgrading} connections are being upgraded; ask again"
            )
        task = asyncio.current_task()
        assert task is not None

        def leave_http() -> None:
            self._connections.pop(task, None)
            self._upgrading.pop(task, None)

        self._upgrading[task] = asyncio.get_running_loop().time()
        await upgrade(head, streams, leave_http)

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, task: asyncio.Task[None]
    ) -> bool:
        """Read one request and answer it; True if the connection is kept open."""
        keep = is_refused = False
        admission = Admission()
        try:
            head = await self._read_head(reader)
            if head is None:
                return False
            keep = head.is_keep_alive
            path, query = parse_target(head.target)
            if (upgrade := self._upgrades.get(path)) is not None:
                await self._upgrade(upgrade, head, (reader, writer))
                return False
            admission = self._admit(head)
            body = await self._read_body(reader, writer, head, self._body_limit(path))
            admission.check_body(body)
            self._answering.add(task)
            response = await self._answer(Request(head.method, path, query, body))
        except RequestRefused as refused:
            keep, is_refused, response = False, True, refused.response
            self._log_refusal(response.status, str(refused))
        keep = keep and not self._is_closing
        self._answering.discard(task)  # from here on the connection only waits for the client
        await self._send(writer, response, keep, admission)
        if is_refused:
            await _discard_unread_input(reader, writer)
        return keep

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._handle(request)
        except Exception as error:  # an error of the agent must not look like a lost connection
            self._log_refusal(HTTPStatus.INTERNAL_SERVER_ERROR, f"{request.method} {request.path} failed: {error!r}")
            return Response(HTTPStatus.INTERNAL_SERVER_ERROR, {"detail": "the agent could not answer; see its log"})

    async def _read_head(self, reader: asyncio.StreamReader) -> Head | None:
        """Read up to the empty line; None if the client closed or was idle between two requests."""
        try:
            first = await asyncio.wait_for(reader.read(1), self._idle_timeout_s)
        except asyncio.TimeoutError:
            return None
        if not first:
            return None
        try:
            rest = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), self._head_timeout_s)
        except asyncio.LimitOverrunError:
            raise RequestRefused(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"the head has more than {MAX_HEAD_BYTES} bytes"
            ) from None
        return parse_head(first + rest)

    async def _read_body(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: Head, limit: int
    ) -> bytes:
        coding = head.headers.get("transfer-encoding")
        is_chunked = coding is not None and coding.lower() == "chunked"
        if coding is not None and not is_chunked:
            raise RequestRefused(HTTPStatus.NOT_IMPLEMENTED, "only the transfer coding chunked is supported")
        length = content_length(head.headers)
        if length > limit:
            raise RequestRefused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has {length} bytes; at most {limit} are allowed"
            )
        if not length and not is_chunked:
            return b""
        if head.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        reading = _read_chunks(reader, limit) if is_chunked else reader.readexactly(length)
        if not is_chunked and length <= LARGE_BODY_BYTES:
            return await asyncio.wait_for(reading, self._body_timeout_s)
        async with self._large_bodies:
            return await asyncio.wait_for(reading, self._body_timeout_s)

    async def _send(self, writer: asyncio.StreamWriter, response: Response, keep: bool, admission: Admission) -> None:
        is_raw = isinstance(response.body, bytes)
        body: bytes = response.body if is_raw else b"" if response.body is None else json.dumps(response.body).encode()
        lines = [f"HTTP/1.1 {int(response.status)} {HTTPStatus(response.status).phrase}"]
        if body and not is_raw:
            lines.append("Content-Type: application/json")
        lines += [f"Content-Length: {len(body)}", f"Connection: {'keep-alive' if keep else 'close'}"]
        headers = {**response.headers, **admission.answer_headers(int(response.status), body)}
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        await asyncio.wait_for(writer.drain(), self._body_timeout_s)


def _open_to_all(port: int) -> socket.socket:
    """Give one socket for IPv4 and IPv6, or for IPv4 alone where IPv6 is switched off. Raises OSError if the port is in use."""
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    return socket.create_server(("0.0.0.0", port))  # noqa: S104  # the operator calls from another pod


async def _close_connection(writer: asyncio.StreamWriter) -> None:
    """Close. Data that the client does not read in time is dropped, so that it cannot hold the descriptor."""
    writer.close()
    with suppress(OSError, asyncio.TimeoutError, asyncio.CancelledError):
        await asyncio.wait_for(writer.wait_closed(), _CLOSE_TIMEOUT_S)
    writer.transport.abort()


async def _discard_unread_input(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Read for a moment before closing: a close with unread data would reset the connection before the client has read the answer."""
    writer.write_eof()
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(_discard(reader, _LINGER_BYTES), _LINGER_S)


async def _discard(reader: asyncio.StreamReader, limit: int) -> None:
    while limit > 0 and (data := await reader.read(64 * 1024)):
        limit -= len(data)


async def _read_chunks(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Read a chunked body with its trailers."""
    body = bytearray()
    while True:
        size_text = (await _read_line(reader)).partition(b";")[0].strip()
        try:
            size = int(size_text, 16)
        except ValueError:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "a chunk has no size") from None
        if size < 0 or len(body) + size > limit:
            raise RequestRefused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {limit} bytes")
        if size == 0:
            while await _read_line(reader) != b"":
                pass
            return bytes(body)
        body += await reader.readexactly(size)
        if await reader.readexactly(2) != b"\r\n":
            raise RequestRefused(HTTPStatus.BAD_REQUEST, "a chunk does not have the size that it says")


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    try:
        return (await reader.readuntil(b"\r\n"))[:-2]
    except asyncio.LimitOverrunError:
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "a line in a chunked body has no end") from None
