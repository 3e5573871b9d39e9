"""The store that an agent serves, as a worker sees it: one connection for each rank and generation, which all threads share.

One of the threads that wait for answers reads those of all, so a call that waits holds up no other, and a single caller is woken by
nothing but its answer. When the connection is closed or lost, all calls end at once: they raise ConnectionError, as do all later ones.
No call is made again over another one, since a call whose answer is lost may have counted; who knows better asks for `renewed`.
Imports no torch.
"""

from __future__ import annotations

import hmac
import http.client
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from http import HTTPStatus

from elastipod.errors import ElastipodError
from elastipod.store_wait import pauses
from elastipod.store_wire import (
    HANDSHAKE_S,
    HEAD_BYTES,
    HEADER,
    MAX_ANSWER_BYTES,
    MAX_PARTS,
    MAX_REQUEST_BYTES,
    MAX_WAIT_S,
    PATH,
    UPGRADE,
    AnswerKind,
    Greeting,
    SealedSession,
    WireError,
    content_and_mac,
    fields_of,
    number,
    rest_of_frame,
)

ANSWER_S = 30.0  # for an answer, beyond what the call waits for; an agent answers at once
_CHUNK = 256 * 1024
_KEYS_AT_ONCE = 256  # in one call
_REQUEST_BYTES = MAX_REQUEST_BYTES // 2  # of keys and values in one call


class StoreCallRefused(ElastipodError, RuntimeError):
    """The store does not carry out a call, such as one beyond its limits; the text says why."""


class StoreConnection:
    """Calls from any thread. Made by `open_store`."""

    def __init__(
        self,
        peer: socket.socket,
        session: SealedSession,
        address: str,
        open_again: Callable[[float], StoreConnection],
    ) -> None:
        """session: whose agent has proven that it has the key. open_again: gives another connection of this rank within seconds."""
        self._peer, self._session, self._address = peer, session, address
        self._open_again = open_again
        self._renewing = threading.Lock()  # guards the next one; `close` does not wait for it
        self._successor: StoreConnection | None = None
        self._closed = ""  # why nobody wants it any more
        self._received = bytearray()
        self._sending = threading.Lock()  # the order of frames is that of their seals
        self._last = 0
        self._turn = threading.Condition()  # guards what follows
        self._answers: dict[bytes, list[bytes]] = {}
        self._is_read = False  # by one of those who wait
        self._end = ""  # why there is no connection any more
        self._pid = os.getpid()
        self._send([])

    def call(self, name: bytes, *arguments: bytes, wait_s: float = 0.0) -> list[bytes]:
        """Make a call and give what follows the status of its answer. wait_s: how long the agent may delay it.

        Raises ConnectionError when the connection is lost or closed, TimeoutError when the agent says that it is late, and
        StoreCallRefused.
        """
        if self._pid != os.getpid():
            raise ConnectionError("a forked process does not use the store connection of its parent")
        with self._sending:
            self._last += 1
            ticket = number(self._last)
            self._send([ticket, name, *arguments])
        answer = self._answer(ticket, time.monotonic() + wait_s + ANSWER_S)
        if answer is None:
            raise ConnectionError(f"the store at {self._address} is gone: {self._end}")
        status, *values = answer
        if status == AnswerKind.REFUSED:
            raise StoreCallRefused(f"the store at {self._address} refuses {name.decode()}: {_text(values)}")
        if status == AnswerKind.LATE:
            raise TimeoutError(f"not everything that was waited for is in the store at {self._address}")
        return values

    def close(self, why: str = "it was closed") -> None:
        """End every call that is under way, and all later ones. From any thread."""
        if self._pid != os.getpid():
            return  # the connection is that of the parent
        self._closed = self._closed or why
        if self._successor is not None:
            self._successor.close(why)
        self._lose(why)
        with self._turn:
            if not self._is_read:  # else the one who reads it closes it
                self._peer.close()

    def renewed(self, limit_s: float) -> StoreConnection:
        """Give this connection, or the one that follows it where it was lost, which `close` of this one closes too. From any thread.

        Raises ConnectionError when it was closed, or the agent has said that the generation is over, and as `open_store`.
        """
        with self._renewing:
            newest = self._successor or self
            if newest._end and not self._closed:
                newest = self._successor = self._open_again(limit_s)
        if self._closed:
            newest.close(self._closed)
            raise ConnectionError(f"the store at {self._address} is gone: {self._closed}")
        return newest

    def _lose(self, why: str) -> None:
        self._end = self._end or why
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads

    def _send(self, parts: Sequence[bytes]) -> None:
        try:
            self._peer.sendall(self._session.seal(parts))
        except OSError as error:
            self._lose(str(error))

    def _answer(self, ticket: bytes, deadline: float) -> list[bytes] | None:
        """Wait for an answer, and read those of other threads meanwhile if none of them does; None when there will be none."""
        while True:
            with self._turn:
                may_go_on = self._turn.wait_for(
                    lambda: ticket in self._answers or self._end or not self._is_read, deadline - time.monotonic()
                )
                if not may_go_on:  # the one who reads may wait for longer
                    self._lose("it does not answer")
                if ticket in self._answers or self._end:
                    return self._answers.pop(ticket, None)
                self._is_read = True
            try:
                self._read_until(ticket, deadline)
            finally:
                with self._turn:
                    self._is_read = False
                    if self._end:
                        self._peer.close()
                    self._turn.notify_all()

    def _read_until(self, ticket: bytes, deadline: float) -> None:
        """Read answers up to that of one call."""
        try:
            while ticket not in self._answers and not self._end:
                read, *answer = self._next_frame(deadline)
                if not read:  # all ranks are told, and are not to ask again
                    self._closed = self._closed or _text(answer[1:])
                    raise ConnectionResetError(self._closed)
                with self._turn:
                    self._answers[read] = answer
                    self._turn.notify_all()
        except (OSError, WireError, ValueError) as error:
            self._lose(str(error))

    def _next_frame(self, deadline: float) -> list[bytes]:
        size = HEAD_BYTES + rest_of_frame(self._filled(HEAD_BYTES, deadline), MAX_ANSWER_BYTES)
        frame = self._filled(size, deadline)
        del self._received[:size]
        return self._session.open(*content_and_mac(frame[HEAD_BYTES:]))

    def _filled(self, size: int, deadline: float) -> bytes:
        while len(self._received) < size:
            try:
                chunk = self._peer.recv(_CHUNK)
            except TimeoutError:  # the limit of one send or receipt
                if time.monotonic() > deadline:
                    raise ConnectionResetError("it does not answer") from None
                continue
            if not chunk:
                raise ConnectionResetError("the agent has closed the connection")
            self._received += chunk
        return bytes(self._received[:size])


def meet_at(connection: StoreConnection | None) -> None:
    """Let the ranks of this process's generation agree on events at a store that an agent serves; None: no longer."""
    global _met_at
    _met_at = connection


def meeting_place() -> StoreConnection | None:
    """Give the connection to the store at which the generation of this process has met, if an agent serves it."""
    return _met_at


_met_at: StoreConnection | None = None


class AgentStore:
    """The `Store` of the agreement on an event (`elastipod.stores`), with all keys below ``prefix``; of the followers too."""

    def __init__(self, connection: StoreConnection, prefix: str) -> None:
        self._calls = connection.call
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self.set_many({key: value})

    def get(self, key: str) -> bytes:
        """Give a value that is there. Raises TimeoutError."""
        return self.get_many([key])[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._calls(b"add", self._key(key), number(amount))[0])

    def has(self, key: str) -> bool:
        return bool(int(self._calls(b"check", self._key(key))[0]))

    def set_many(self, values: dict[str, bytes]) -> None:
        set_all(self._calls, [(self._key(key), value) for key, value in values.items()])

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        return get_all(self._calls, [self._key(key) for key in keys], 0.0)

    def wait(self, key: str, timeout_s: float) -> None:
        wait_for(self._calls, b"wait", [self._key(key)], time.monotonic() + timeout_s)

    def _key(self, key: str) -> bytes:
        return f"{self._prefix}/{key}".encode()


Calls = Callable[..., list[bytes]]


def set_all(call: Calls, values: Iterable[tuple[bytes, bytes]]) -> None:
    """Set keys, with as few calls as their size allows."""
    parts: list[bytes] = []
    size = 0
    for key, value in values:
        if parts and (size + len(key) + len(value) > _REQUEST_BYTES or len(parts) >= 2 * _KEYS_AT_ONCE):
            call(b"set", *parts)
            parts, size = [], 0
        parts += (key, value)
        size += len(key) + len(value)
    if parts:
        call(b"set", *parts)


def get_all(call: Calls, keys: Sequence[bytes], timeout_s: float) -> list[bytes]:
    """Give the values of keys once all are there. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    values: list[bytes] = []
    for first in range(0, len(keys), _KEYS_AT_ONCE):
        values += wait_for(call, b"get", keys[first : first + _KEYS_AT_ONCE], deadline)
    return values


def wait_for(call: Calls, name: bytes, keys: Sequence[bytes], deadline: float) -> list[bytes]:
    """Make a call that waits, again and again until the deadline (monotonic). Raises TimeoutError."""
    assert len(keys) < MAX_PARTS
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            return call(name, number(min(left_s, MAX_WAIT_S)), *keys, wait_s=min(left_s, MAX_WAIT_S))
        except TimeoutError:
            if left_s <= MAX_WAIT_S:
                raise


class ConnectionRefused(ConnectionError):
    """The agent does not serve this rank, now or later; the text says why."""


def open_store(
    address: str,
    greeting: Greeting,
    key: str,
    limit_s: float,
    is_unwanted: Callable[[], bool] = lambda: False,
    *,
    world_size: int = 1,
) -> StoreConnection:
    """Connect to the agent at host:port. Raises ConnectionRefused; TimeoutError when it cannot be reached, or nobody wants it any more.

    An agent that has as many callers as it takes is asked again. It may not have been told of the generation yet: calls wait for that.
    world_size: how many ranks may ask it at the same time.
    """
    deadline = time.monotonic() + limit_s
    why = "nobody has asked it"
    for pause_s in pauses(world_size, random.SystemRandom()):
        left_s = deadline - time.monotonic()
        if left_s <= 0 or is_unwanted():
            break
        try:
            return _open(address, greeting, key, min(left_s, HANDSHAKE_S), world_size)
        except ConnectionRefused as error:
            raise ConnectionRefused(f"the agent at {address} does not serve the store to this rank: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            why = str(error)
        time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))
    raise TimeoutError(f"the agent at {address}, which serves the store, cannot be reached: {why}")


def _open(address: str, greeting: Greeting, key: str, limit_s: float, world_size: int) -> StoreConnection:
    host, _, port = address.rpartition(":")
    asked = http.client.HTTPConnection(host, int(port), timeout=limit_s)
    try:
        asked.request("GET", PATH, headers={"Connection": "Upgrade", "Upgrade": UPGRADE, HEADER: greeting.header()})
        answer = asked.getresponse()
        if answer.status != HTTPStatus.SWITCHING_PROTOCOLS:
            raise _refusal(answer.status, answer.read(_CHUNK))
        told = fields_of(answer.headers.get(HEADER, ""))
        session = SealedSession(key, greeting, told.get("challenge", ""), is_agent=False)
        if not hmac.compare_digest(told.get("mac", ""), session.agent_proof):
            raise ConnectionRefused("it does not have the key of this job")
        answer.close()
        peer, asked.sock = asked.sock, None
    finally:
        asked.close()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.settimeout(ANSWER_S)

    def open_again(limit_s: float) -> StoreConnection:
        again = Greeting(greeting.generation, greeting.rank)  # with a challenge of its own
        return open_store(address, again, key, limit_s, world_size=world_size)

    return StoreConnection(peer, session, address, open_again)


def _refusal(status: int, body: bytes) -> ConnectionError:
    try:
        why = str(json.loads(body)["detail"])
    except (ValueError, LookupError, TypeError):
        why = f"it answers with {status}"
    return ConnectionAbortedError(why) if status == HTTPStatus.SERVICE_UNAVAILABLE else ConnectionRefused(why)


def _text(parts: Sequence[bytes]) -> str:
    return b" ".join(parts).decode(errors="replace")
