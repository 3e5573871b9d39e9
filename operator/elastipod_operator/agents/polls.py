"""Long polls, one kept connection for each agent. What one poll costs, times ten thousand agents, is what an idle operator costs.

Supports only the part of HTTP/1.1 that our agents use: a status, a Content-Length and a body. Any other response raises
UnsupportedResponse, and the agent is then polled by a general client.
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress

from .authentication import ANSWER_HEADER, Response

MAX_HEAD_BYTES = 16 * 1024
STATUS_LINE = re.compile(rb"HTTP/1\.1 ([0-9]{3})(?: |$)")
LENGTH = re.compile(rb"[0-9]{1,9}")
# TCP keepalive during a poll: idle time, interval and count. It detects a machine without power after five seconds.
PROBES = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 2}
# Offsets in Linux's struct tcp_info of the milliseconds since the last data and the last acknowledgement.
LAST_DATA_AND_ACK = struct.Struct("=52x2I")
# Headers that change the encoding of the body.
UNSUPPORTED_HEADERS = frozenset({b"transfer-encoding", b"content-encoding", b"upgrade"})


# The headers of a response that the caller gets.
KEPT_HEADERS = frozenset({b"www-authenticate", ANSWER_HEADER.lower().encode()})


class UnsupportedResponse(Exception):
    """The response needs a general HTTP client."""


class TooLarge(Exception):
    """The response is larger than any valid one."""


class ConnectFailed(OSError):
    """The connection failed; errno says why."""


class PollInterrupted(Exception):
    """The poll was interrupted, because the caller needs a new response at once."""


class PollConnection(asyncio.Protocol):
    """A connection to one agent, for one poll at a time. After an exception it is closed and a new one is needed.

    host, port: the agent's address. max_bytes: limit of a body. hold: called with the change in bytes held of an incomplete
    response; False if no more may be held.
    """

    def __init__(self, host: str, port: int, max_bytes: int, hold: Callable[[int], bool] = lambda _: True) -> None:
        self._host, self._port = host, port
        shown_host = f"[{host}]" if ":" in host else host
        self._headers = _lines({"Host": f"{shown_host}:{port}", "Accept-Encoding": "identity"})
        self._max_bytes = max_bytes
        self._hold = hold
        self._num_held = 0
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiter: asyncio.Future[Response] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at: float | None = None

    async def ask(self, target: str, connect_s: float, limit_s: float, headers: Mapping[str, str]) -> Response:
        """GET a target. headers: sent with the call. Raises OSError (also after a time-out), UnsupportedResponse or TooLarge."""
        loop = asyncio.get_running_loop()
        if self._transport is None:
            try:
                async with asyncio.timeout(connect_s):
                    await loop.create_connection(lambda: self, self._host, self._port)
            except TimeoutError:
                raise
            except OSError as error:
                raise ConnectFailed(error.errno, str(error)) from error
        assert self._transport is not None
        waiter: asyncio.Future[Response] = loop.create_future()
        self._waiter = waiter
        self._deadline = loop.time() + limit_s
        if self._timer is None:
            self._timer = loop.call_at(self._deadline, self._check_deadline, loop)
        self._transport.write(f"GET {target} HTTP/1.1\r\n{self._headers}{_lines(headers)}\r\n".encode())
        try:
            return await waiter
        finally:
            self._waiter = None

    def interrupt(self) -> None:
        """Interrupt the present poll, if any: it raises PollInterrupted."""
        if self._waiter is not None:
            self._fail(PollInterrupted())

    def heard_at(self) -> float | None:
        """Give when the agent's machine last sent anything (monotonic), according to the kernel; None if unknown.

        For a closed connection this is the last known value.
        """
        if self._transport is not None:
            self._note_heard()
        return self._heard_at

    def _note_heard(self) -> None:
        with suppress(OSError, AttributeError, struct.error):
            assert self._transport is not None
            sock = self._transport.get_extra_info("socket")
            told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, LAST_DATA_AND_ACK.size)
            self._heard_at = asyncio.get_running_loop().time() - min(LAST_DATA_AND_ACK.unpack(told)) / 1000

    def close(self) -> None:
        """Drop the connection."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._note_heard()
            self._transport.abort()
            self._transport = None
        self._clear()

    def _clear(self) -> None:
        self._buffer.clear()
        if self._num_held:
            self._hold(-self._num_held)
            self._num_held = 0

    def _hold_buffer(self) -> None:
        """Count the bytes of an incomplete response."""
        more = len(self._buffer) - self._num_held
        if self._hold(more):
            self._num_held += more
        else:
            self._fail(TooLarge("the agents of the job send too many large responses at a time"))

    # -- from the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when the connection is established."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in PROBES.items():
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def connection_lost(self, error: Exception | None) -> None:
        """Called when the connection was closed or broke."""
        if self._transport is not None:
            self._note_heard()
            self._transport = None
        self._fail(error if isinstance(error, OSError) else ConnectionResetError("the agent closed the connection"))

    def data_received(self, data: bytes) -> None:
        """Called with a part of a response."""
        if self._waiter is None:
            self.close()  # no poll is pending
            return
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                self._fail(TooLarge(f"the head of the agent's answer is larger than {MAX_HEAD_BYTES} bytes"))
            else:
                self._hold_buffer()
            return
        try:
            status, length, is_kept, kept = _read_head(bytes(self._buffer[:end]))
        except UnsupportedResponse as error:
            self._fail(error)
            return
        if length > self._max_bytes:
            self._fail(TooLarge(f"the agent's /status is larger than {self._max_bytes} bytes"))
            return
        have = len(self._buffer) - end - 4
        if have < length:
            self._hold_buffer()
            return
        if have > length:
            self._fail(UnsupportedResponse("there is more after the response"))
            return
        body = bytes(self._buffer[end + 4 :])
        self._clear()
        if not self._waiter.done():
            self._waiter.set_result(Response(status, kept, body))
        if not is_kept:
            self.close()

    def _fail(self, error: Exception) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
        self.close()

    def _check_deadline(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the deadline. One timer serves many polls and is set again only when it fires too early."""
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if loop.time() >= self._deadline:
            self._fail(TimeoutError("the agent did not answer in time"))
        else:
            self._timer = loop.call_at(self._deadline, self._check_deadline, loop)


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def _read_head(head: bytes) -> tuple[int, int, bool, dict[str, str]]:
    """Give status, length of the body, whether the connection stays, and KEPT_HEADERS. Raises UnsupportedResponse."""
    first, *lines = head.split(b"\r\n")
    found = STATUS_LINE.match(first)
    if found is None:
        raise UnsupportedResponse("the response is not HTTP/1.1")
    length: int | None = None
    is_kept = True
    kept: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        name, value = name.lower(), value.strip()
        if name == b"content-length":
            if length is not None or LENGTH.fullmatch(value) is None:
                raise UnsupportedResponse("Content-Length is not a number, or there are two")
            length = int(value)
        elif name == b"connection":
            is_kept = value.lower() != b"close"
        elif name in KEPT_HEADERS:
            kept[name.decode()] = value.decode("latin-1")
        elif name in UNSUPPORTED_HEADERS:
            raise UnsupportedResponse(f"the response has {name.decode()}")
    if length is None:
        raise UnsupportedResponse("the response has no Content-Length")
    return int(found[1]), length, is_kept, kept
