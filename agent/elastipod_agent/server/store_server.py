"""Serves the store of a generation to the workers of its job: connections that were upgraded from HTTP (docs/design/contracts.md, 13)."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from http import HTTPStatus

from elastipod.store_wire import (
    HANDSHAKE_S,
    HEAD_BYTES,
    HEADER,
    MAX_GREETING_BYTES,
    MAX_REQUEST_BYTES,
    MAX_WAIT_S,
    UPGRADE,
    AnswerKind,
    Greeting,
    SealedSession,
    WireError,
    content_and_mac,
    rest_of_frame,
)
from elastipod_agent.core.served_store import Answers, CallRefused, StoreAdmission, StoreFence, StoreKeys, Ticket
from elastipod_agent.server.http_messages import Head, RequestRefused
from elastipod_agent.workers.linux import allow_descriptors

KEEPALIVE_S = 30  # a worker whose node is gone closes nothing
# That an agent has for all else: calls, workers and their output. It is what containerd 2 allows without more ado.
OTHER_DESCRIPTORS = 1024

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StoreServer:
    """Belongs to the event loop's thread. key: which the workers of the job share; "" serves nobody."""

    def __init__(self, key: str, log_refusal: Callable[[int, str], None], warn: Callable[[str], None]) -> None:
        self.fence = StoreFence()
        self._key = key
        self._log_refusal, self._warn = log_refusal, warn
        self._keys = StoreKeys(0)
        self._connections: dict[int, _Connection] = {}
        self._numbers = itertools.count()
        self._changed = asyncio.Event()

    # -- the agent's side ------------------------------------------------------------------------------------------

    def begin(self, generation: int, num_ranks: int, *, is_server: bool) -> None:
        """A generation of this many workers is started. is_server: its ranks meet here, and nobody else's."""
        self.fence.begin(generation, num_ranks, is_server=is_server)
        wanted = OTHER_DESCRIPTORS + self.fence.max_connections
        if is_server and not allow_descriptors(wanted):
            self._warn(
                f"the store for {num_ranks} ranks may need {wanted} descriptors, and the hard limit is lower; raise it (ulimit -Hn)"
            )
        self._renew(num_ranks)

    def end(self) -> None:
        """What is served is over: every call that waits fails at once."""
        self.fence.end()
        self._renew(0)

    def close(self) -> None:
        """Nothing is served here any more."""
        self.end()
        for connection in list(self._connections.values()):
            connection.dismiss("the agent ends")

    def _renew(self, num_ranks: int) -> None:
        self._keys = StoreKeys(num_ranks)
        for connection in list(self._connections.values()):
            if self.fence.admits(connection.generation) is StoreAdmission.OVER:
                connection.dismiss(self.fence.refusal(connection.generation))
        self._changed.set()
        self._changed = asyncio.Event()

    # -- the workers' side -----------------------------------------------------------------------------------------

    async def serve(self, head: Head, streams: Streams, leave_http: Callable[[], None]) -> None:
        """Take over a connection that asks for the store, to its end.

        leave_http: called once the caller has proven that it has the key; until then the connection counts as any other. Raises
        RequestRefused before the upgrade, and OSError or IncompleteReadError when the caller is gone.
        """
        greeting = self._greeted(head)
        challenge = secrets.token_hex(16)
        session = SealedSession(self._key, greeting, challenge, is_agent=True)
        connection = _Connection(next(self._numbers), greeting.generation, session, streams)
        connection.upgrade(f"challenge={challenge}, mac={session.agent_proof}")
        try:
            await asyncio.wait_for(connection.read(MAX_GREETING_BYTES), HANDSHAKE_S)
            self._connections[connection.number] = connection
            leave_http()
            await self._until_served(connection)
            while not connection.is_dismissed:
                await self._exchange(connection)
        except WireError as error:
            self._log_refusal(HTTPStatus.UNAUTHORIZED, f"store: {error}")
            connection.dismiss(str(error))
        finally:
            self._connections.pop(connection.number, None)
            self._keys.forget(connection.number)

    def _greeted(self, head: Head) -> Greeting:
        if not self._key:
            raise RequestRefused(HTTPStatus.NOT_FOUND, "this agent serves no store: it has no key of its job")
        if head.method != "GET" or head.headers.get("upgrade", "").lower() != UPGRADE:
            raise RequestRefused(HTTPStatus.UPGRADE_REQUIRED, f"ask with Upgrade: {UPGRADE}", {"Upgrade": UPGRADE})
        try:
            greeting = Greeting.parse(head.headers.get(HEADER.lower(), ""))
        except WireError as error:
            raise RequestRefused(HTTPStatus.BAD_REQUEST, str(error)) from error
        if self.fence.admits(greeting.generation) is StoreAdmission.OVER:
            raise RequestRefused(HTTPStatus.CONFLICT, self.fence.refusal(greeting.generation))
        if len(self._connections) >= self.fence.max_connections:
            raise RequestRefused(
                HTTPStatus.SERVICE_UNAVAILABLE, "too many connections for the ranks that are known here"
            )
        return greeting

    async def _until_served(self, connection: _Connection) -> None:
        """Wait for the /start of the caller's generation: it may reach other agents earlier than this one."""
        generation = connection.generation
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._decided(generation), MAX_WAIT_S)
        if self.fence.admits(generation) is not StoreAdmission.SERVE and not connection.is_dismissed:
            connection.dismiss(self.fence.refusal(generation))

    async def _decided(self, generation: int) -> None:
        while self.fence.admits(generation) is StoreAdmission.WAIT:
            await self._changed.wait()

    async def _exchange(self, connection: _Connection) -> None:
        parts = await connection.read(MAX_REQUEST_BYTES)
        if connection.is_dismissed:
            return
        if len(parts) < 2:
            raise WireError("a call has a number and a name")
        ticket = connection.number, parts[0]
        try:
            answers, wait_s = self._keys.call(ticket, parts[1], parts[2:])
        except CallRefused as error:
            self._log_refusal(HTTPStatus.BAD_REQUEST, f"store: {error}")
            answers, wait_s = [(ticket, [AnswerKind.REFUSED, str(error).encode()])], 0.0
        if wait_s:
            asyncio.get_running_loop().call_later(wait_s, self._give_up, self._keys, ticket)
        self._send(answers)
        await connection.drain()

    def _give_up(self, keys: StoreKeys, ticket: Ticket) -> None:
        self._send(keys.give_up(ticket))

    def _send(self, answers: Answers) -> None:
        for (number, call), parts in answers:
            if (connection := self._connections.get(number)) is not None:
                connection.send([call, *parts])


class _Connection:
    """A connection of one worker. number: tells it from all others."""

    def __init__(self, number: int, generation: int, session: SealedSession, streams: Streams) -> None:
        self.number, self.generation = number, generation
        self.is_dismissed = False
        self._session = session
        self._reader, self._writer = streams

    def upgrade(self, told: str) -> None:
        """Tell the caller that HTTP ends here."""
        _watch_peer(self._writer.get_extra_info("socket"))
        lines = ("HTTP/1.1 101 Switching Protocols", "Connection: Upgrade", f"Upgrade: {UPGRADE}", f"{HEADER}: {told}")
        self._writer.write("\r\n".join((*lines, "", "")).encode())

    async def read(self, limit: int) -> list[bytes]:
        """Give the next frame. Raises WireError, OSError, IncompleteReadError."""
        rest = await self._reader.readexactly(rest_of_frame(await self._reader.readexactly(HEAD_BYTES), limit))
        return self._session.open(*content_and_mac(rest))

    def send(self, parts: Sequence[bytes]) -> None:
        """Send a frame; what the peer does not take at once is kept."""
        if not self.is_dismissed:
            self._writer.write(self._session.seal(parts))

    async def drain(self) -> None:
        """Wait until the peer has taken what was sent. Raises OSError."""
        await self._writer.drain()

    def dismiss(self, why: str) -> None:
        """Say why, and close."""
        self.send([b"", AnswerKind.OVER, why.encode()])
        self.is_dismissed = True
        self._writer.close()


def _watch_peer(peer: socket.socket) -> None:
    """Have the kernel find out that a peer is gone whose node has lost its power or its network."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S // 3)
