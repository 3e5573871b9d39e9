"""Serves the pod's socket, and limits what a worker can send, hold open, or keep waiting."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections import Counter
from contextlib import suppress
from pathlib import Path

from elastipod.ipc.protocol import MAX_CALL_BYTES, MalformedMessage, decode
from elastipod_agent.ipc.run_coordinator import RunCoordinator
from elastipod_agent.ipc.worker_calls import BadCall, WorkerCalls

MAX_PER_PROCESS = 32
_MAX_PATH_BYTES = 107  # the limit for the address of a Unix socket
_SEND_TIMEOUT_S = 30.0


class IpcServer:
    """Has one task per connection, so none waits for another. Only the agent's own user can open the socket."""

    def __init__(self, coordinator: RunCoordinator, path: Path) -> None:
        self.path = path
        self._calls = WorkerCalls(coordinator)
        self._max_connections = 64 + 16 * coordinator.nproc
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._by_process: Counter[int] = Counter()

    async def listen(self) -> None:
        """Start to serve. Raises OSError."""
        if len(os.fsencode(self.path)) > _MAX_PATH_BYTES:
            raise OSError(f"{self.path} is too long for a socket; choose a shorter TMPDIR")
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=MAX_CALL_BYTES)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        process = _peer(writer)
        self._tasks.add(task)
        self._by_process[process] += 1
        try:
            if self._by_process[process] > MAX_PER_PROCESS or len(self._tasks) > self._max_connections:
                await _send(writer, _error("too many connections"))
                return
            await self._answer_calls(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the worker is gone or reads no answer, or the agent shuts down
        finally:
            self._tasks.discard(task)
            self._by_process[process] -= 1
            if not self._by_process[process]:
                del self._by_process[process]
            writer.transport.abort()

    async def _answer_calls(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer calls until the worker disconnects. Data that arrives while a call is pending ends the connection: only an end may."""
        line = await _line(reader)
        while line is not None:
            try:
                call = decode(line)
            except MalformedMessage as error:
                await _send(writer, _error(str(error)))
                return
            following = asyncio.ensure_future(_line(reader))
            answering = asyncio.ensure_future(self._answer(call))
            try:
                await asyncio.wait([following, answering], return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    return
                await _send(writer, answering.result())
                line = await following
            finally:
                for task in (following, answering):
                    task.cancel()
                    with suppress(asyncio.CancelledError, OSError, MalformedMessage):
                        await task

    async def _answer(self, call: dict[str, object]) -> bytes:
        try:
            return await self._calls.answer(call)
        except BadCall as error:
            return _error(str(error))


async def _line(reader: asyncio.StreamReader) -> bytes | None:
    """Read the next call, None at the end of the connection."""
    try:
        return await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        return b"too long"


async def _send(writer: asyncio.StreamWriter, answer: bytes) -> None:
    writer.write(answer + b"\n")
    draining = asyncio.ensure_future(writer.drain())
    try:  # wait_for can swallow a cancellation before Python 3.12
        await asyncio.wait([draining], timeout=_SEND_TIMEOUT_S)
        if not draining.done():
            raise ConnectionAbortedError("the worker reads no answer")
        draining.result()
    finally:
        draining.cancel()


def _error(sentence: str) -> bytes:
    return json.dumps({"error": sentence}).encode()


def _peer(writer: asyncio.StreamWriter) -> int:
    """Give the pid of the peer."""
    connection: socket.socket = writer.get_extra_info("socket")
    pid: int = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    return pid
