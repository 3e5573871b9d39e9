"""The agent's side of one fork server: starts it, asks it for workers, ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from elastipod_agent.core.exits import describe_status
from elastipod_agent.core.warm_start import Program
from elastipod_agent.fork_server import bootstrap, process_title
from elastipod_agent.fork_server.channel import MAX_DESCRIPTORS, BadMessage, MessageReader
from elastipod_agent.fork_server.forked_worker import ForkedWorker, send
from elastipod_agent.waiting import set_within
from elastipod_agent.workers import process_table
from elastipod_agent.workers.failure import last_lines
from elastipod_agent.workers.output_pump import OutputPump, OutputStream
from elastipod_agent.workers.reaper import ChildProcess, Reaper

# About what a cold start takes, which is what follows: a server that is slow on a busy machine is still the quicker way.
ANSWER_LIMIT_S = 10.0
_END_LIMIT_S = 5.0
_CLOSED_LIMIT_S = 0.5
_POLL_S = 0.25
_CHUNK = 64 * 1024


class ForkServerLost(Exception):
    """The server can no longer be used; the text says why."""


class ForkRefused(Exception):
    """The server refuses to fork. is_stale: because a module that it imported has changed."""

    def __init__(self, why: str, *, is_stale: bool) -> None:
        super().__init__(why)
        self.is_stale = is_stale


class ForkServerClient:
    """One server from its start to its end. is_ready: it has imported everything and can fork workers.

    lost_reason: set once it can no longer be used; is_unusable: a new one could not be used either.
    """

    def __init__(
        self,
        child: ChildProcess,
        channel: socket.socket,
        console: OutputStream,
        environ: Mapping[str, str],
        reaper: Reaper,
    ) -> None:
        self.child = child
        self.environ = environ
        self.is_ready = False
        self.lost_reason: str | None = None
        self.is_unusable = False
        self.last_message_at = asyncio.get_running_loop().time()
        self.module = "the interpreter"
        self.seconds = 0.0
        self.notes: list[str] = []
        self.changed = asyncio.Event()  # set once the server is ready or lost
        self.lost = asyncio.Event()
        self._channel = channel
        self._console = console
        self._reaper = reaper
        self._lines = MessageReader()
        self._answer_queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._request_lock = asyncio.Lock()
        asyncio.get_running_loop().add_reader(channel.fileno(), self._read)

    @classmethod
    async def start(
        cls, interpreter: str, environ: Mapping[str, str], program: Program, modules: Sequence[str],
        reaper: Reaper, pump: OutputPump,
    ) -> ForkServerClient:  # fmt: skip
        """Start a server. Raises OSError."""
        ours, its = socket.socketpair()
        source, sink = os.pipe2(os.O_CLOEXEC)
        ours.setblocking(False)
        command = [interpreter, "-u", bootstrap.__file__, str(its.fileno()), str(os.getpid()), process_title.PADDING]
        try:
            whole = {**environ, process_title.VARIABLE: process_title.PADDING}
            child = await reaper.spawn(command, whole, stdout=sink, stderr=sink, keep=(its.fileno(),))
        except BaseException:
            os.close(source)
            ours.close()
            raise
        finally:
            os.close(sink)
            its.close()
        console = OutputStream(source, b"", None)
        pump.add(console)
        server = cls(child, ours, console, environ, reaper)
        asyncio.ensure_future(child.ended.wait()).add_done_callback(lambda _: server._mark_lost(server._end_reason()))
        with suppress(OSError):  # it has ended already, which is reported like any other end
            await send(ours, {"modules": modules, "kind": program.kind, "target": program.target})
        return server

    async def check(self) -> None:
        """Check that it could fork now. Raises ForkRefused or ForkServerLost."""
        await self._request([])

    async def fork(self, count: int) -> list[ForkedWorker]:
        """Fork processes, in bounded batches. Raises ForkRefused or ForkServerLost; processes of earlier batches end then."""
        forked: list[ForkedWorker] = []
        try:
            while len(forked) < count:
                forked += await self._fork(min(MAX_DESCRIPTORS, count - len(forked)))
        except BaseException:
            for one in forked:
                one.discard()
            raise
        return forked

    async def end(self) -> None:
        """End the server and wait until it is gone."""
        self._mark_lost("the agent ended it")
        self.child.send(signal.SIGKILL)
        await set_within(self.child.ended, _END_LIMIT_S)

    def abandon(self, why: str) -> ForkServerLost:
        """End the server without waiting; gives the exception to raise."""
        return self._kill_lost(why)

    def is_stopped(self) -> bool:
        """Tell whether the process is stopped by a signal."""
        return process_table.is_stopped(self.child.pid)

    async def _fork(self, count: int) -> list[ForkedWorker]:
        pairs = [socket.socketpair() for _ in range(count)]
        try:
            with self._reaper.expecting():
                answer = await self._request([its for _, its in pairs])
                pids = answer["pids"]
                if len(pids) != count:
                    raise self._kill_lost(f"it reported {len(pids)} of {count} pids")
                for ours, _ in pairs:
                    ours.setblocking(False)
                return [self._forked_worker(pid, ours) for pid, (ours, _) in zip(pids, pairs, strict=True)]
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, its in pairs:
                its.close()

    def _forked_worker(self, pid: int, end: socket.socket) -> ForkedWorker:
        return ForkedWorker(self._reaper.adopt(pid), end, self.environ)

    async def _request(self, ends: Sequence[socket.socket]) -> dict[str, Any]:
        async with self._request_lock:
            if self.lost_reason is not None:
                raise ForkServerLost(self.lost_reason)
            try:
                await send(self._channel, {"fork": len(ends)}, [end.fileno() for end in ends])
            except (OSError, asyncio.TimeoutError) as error:
                raise self._kill_lost(f"its channel is broken: {error}") from error
            try:
                answer = await self._next_answer()
            except asyncio.CancelledError:  # its answer must not be taken for the answer to the next request
                self._kill_lost("a start was cancelled")
                raise
        if answer["event"] == "lost":
            raise ForkServerLost(self.lost_reason or "it ended")
        if answer["event"] != "forked":
            raise ForkRefused(answer["why"], is_stale=answer["is_stale"])
        return answer

    async def _next_answer(self) -> dict[str, Any]:
        """Wait for the answer, but not for a process that is stopped. Raises ForkServerLost."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ANSWER_LIMIT_S
        while not self.is_stopped():
            if loop.time() >= deadline:
                raise self._kill_lost(f"it did not answer within {ANSWER_LIMIT_S:g} s")
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._answer_queue.get(), _POLL_S)
        raise self._kill_lost("it is stopped by a signal")

    def _kill_lost(self, why: str) -> ForkServerLost:
        """Mark the server as lost and kill it, so that it cannot come back later."""
        self._mark_lost(why)
        self.child.send(signal.SIGKILL)
        return ForkServerLost(why)

    def _mark_lost(self, why: str) -> None:
        if self.lost_reason is not None:
            return
        self.lost_reason = why
        self.is_ready = False
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        self._answer_queue.put_nowait({"event": "lost"})
        self.changed.set()
        self.lost.set()

    def _end_reason(self) -> str:
        assert self.child.status is not None
        said = last_lines(self._console.tail.decode("utf-8", "replace")).rpartition("\n")[2]
        return f"it ended with {describe_status(self.child.status)}" + (f": {said}" if said else "")

    def _read(self) -> None:
        try:
            data = self._channel.recv(_CHUNK)
            messages = self._lines.feed(data) if data else []
        except BlockingIOError:
            return
        except (OSError, BadMessage) as error:
            self._kill_lost(f"its channel is broken: {error}")
            return
        for message in messages:
            self._handle(message)
        if not data:  # its exit status says more and follows at once
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel.fileno())
            loop.call_later(_CLOSED_LIMIT_S, self.child.send, signal.SIGKILL)

    def _handle(self, message: dict[str, Any]) -> None:
        self.last_message_at = asyncio.get_running_loop().time()
        match message.get("event"):
            case "loading":
                self.module = message["module"]
            case "ready":
                self.is_ready, self.seconds, self.notes = True, message["seconds"], message["notes"]
                self.changed.set()
            case "unusable":
                self.is_unusable = True
                self._kill_lost(message["why"])
            case _:
                self._answer_queue.put_nowait(message)
