"""One warm server, seen from the agent: started, asked for workers, ended."""

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
from elastipod_agent.fork_server.channel import MAX_DESCRIPTORS, BadMessage, Lines
from elastipod_agent.fork_server.forked_worker import Newborn, send
from elastipod_agent.waiting import set_within
from elastipod_agent.workers import process_table
from elastipod_agent.workers.failure import last_lines
from elastipod_agent.workers.output_pump import OutputPump, Stream
from elastipod_agent.workers.reaper import Child, Reaper

ANSWER_LIMIT_S = 5.0
_END_LIMIT_S = 5.0
_CLOSED_LIMIT_S = 0.5
_LOOK_S = 0.25
_CHUNK = 64 * 1024


class ServerLost(Exception):
    """The server cannot be used any more; the text says why."""


class Refused(Exception):
    """The server will not fork now. is_stale: because what it imported has changed."""

    def __init__(self, why: str, *, is_stale: bool) -> None:
        super().__init__(why)
        self.is_stale = is_stale


class WarmServer:
    """From its start to its end. is_ready: it has imported everything, and may be asked for workers.

    why_lost: set once it is of no use any more; is_hopeless: and another one would not be either.
    """

    def __init__(
        self, child: Child, channel: socket.socket, console: Stream, environ: Mapping[str, str], reaper: Reaper
    ) -> None:
        self.child = child
        self.environ = environ
        self.is_ready = False
        self.why_lost: str | None = None
        self.is_hopeless = False
        self.heard_at = asyncio.get_running_loop().time()
        self.module = "the interpreter"
        self.seconds = 0.0
        self.notes: list[str] = []
        self.changed = asyncio.Event()  # set once it is ready or lost
        self.lost = asyncio.Event()
        self._channel = channel
        self._console = console
        self._reaper = reaper
        self._lines = Lines()
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._is_asking = asyncio.Lock()
        asyncio.get_running_loop().add_reader(channel.fileno(), self._read)

    @classmethod
    async def start(
        cls, interpreter: str, environ: Mapping[str, str], program: Program, modules: Sequence[str],
        reaper: Reaper, pump: OutputPump,
    ) -> WarmServer:  # fmt: skip
        """Start one. Raises OSError when that cannot be."""
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
        console = Stream(source, b"", None)
        pump.add(console)
        server = cls(child, ours, console, environ, reaper)
        asyncio.ensure_future(child.ended.wait()).add_done_callback(lambda _: server._lose(server._how_it_ended()))
        with suppress(OSError):  # it has ended, and its end is told as every other
            await send(ours, {"modules": modules, "kind": program.kind, "target": program.target})
        return server

    async def check(self) -> None:
        """Ask whether it could fork now. Raises Refused or ServerLost."""
        await self._ask([])

    async def bear(self, count: int) -> list[Newborn]:
        """Have processes forked, in bounded portions. Raises Refused or ServerLost; those of earlier portions end then."""
        born: list[Newborn] = []
        try:
            while len(born) < count:
                born += await self._bear(min(MAX_DESCRIPTORS, count - len(born)))
        except BaseException:
            for one in born:
                one.let_go()
            raise
        return born

    async def end(self) -> None:
        """End it and wait until it is gone."""
        self._lose("the agent ended it")
        self.child.send(signal.SIGKILL)
        await set_within(self.child.ended, _END_LIMIT_S)

    def give_up(self, why: str) -> ServerLost:
        """End it without waiting; gives the exception that says so."""
        return self._lost(why)

    def is_stopped(self) -> bool:
        """Tell whether somebody has stopped the process with a signal."""
        return process_table.is_stopped(self.child.pid)

    async def _bear(self, count: int) -> list[Newborn]:
        pairs = [socket.socketpair() for _ in range(count)]
        try:
            with self._reaper.expecting():
                answer = await self._ask([its for _, its in pairs])
                pids = answer["pids"]
                if len(pids) != count:
                    raise self._lost(f"it told {len(pids)} of {count} pids")
                for ours, _ in pairs:
                    ours.setblocking(False)
                return [self._newborn(pid, ours) for pid, (ours, _) in zip(pids, pairs, strict=True)]
        except BaseException:
            for ours, _ in pairs:
                ours.close()
            raise
        finally:
            for _, its in pairs:
                its.close()

    def _newborn(self, pid: int, end: socket.socket) -> Newborn:
        return Newborn(self._reaper.adopt(pid), end, self.environ)

    async def _ask(self, ends: Sequence[socket.socket]) -> dict[str, Any]:
        async with self._is_asking:
            if self.why_lost is not None:
                raise ServerLost(self.why_lost)
            try:
                await send(self._channel, {"fork": len(ends)}, [end.fileno() for end in ends])
            except (OSError, asyncio.TimeoutError) as error:
                raise self._lost(f"its channel is broken: {error}") from error
            try:
                answer = await self._answer()
            except asyncio.CancelledError:  # its answer must not be taken for that to the next question
                self._lost("a start was broken off")
                raise
        if answer["event"] == "lost":
            raise ServerLost(self.why_lost or "it ended")
        if answer["event"] != "born":
            raise Refused(answer["why"], is_stale=answer["is_stale"])
        return answer

    async def _answer(self) -> dict[str, Any]:
        """Wait for the answer, but for no process that cannot give one. Raises ServerLost."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ANSWER_LIMIT_S
        while not self.is_stopped():
            if loop.time() >= deadline:
                raise self._lost(f"it did not answer within {ANSWER_LIMIT_S:g} s")
            with suppress(asyncio.TimeoutError):
                return await asyncio.wait_for(self._answers.get(), _LOOK_S)
        raise self._lost("it is stopped by a signal")

    def _lost(self, why: str) -> ServerLost:
        """It cannot be trusted any more: end it, so that it does not come round later."""
        self._lose(why)
        self.child.send(signal.SIGKILL)
        return ServerLost(why)

    def _lose(self, why: str) -> None:
        if self.why_lost is not None:
            return
        self.why_lost = why
        self.is_ready = False
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        self._answers.put_nowait({"event": "lost"})
        self.changed.set()
        self.lost.set()

    def _how_it_ended(self) -> str:
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
            self._lost(f"its channel is broken: {error}")
            return
        for message in messages:
            self._take(message)
        if not data:  # its end says more; it follows at once
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._channel.fileno())
            loop.call_later(_CLOSED_LIMIT_S, self.child.send, signal.SIGKILL)

    def _take(self, message: dict[str, Any]) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        match message.get("event"):
            case "loading":
                self.module = message["module"]
            case "ready":
                self.is_ready, self.seconds, self.notes = True, message["seconds"], message["notes"]
                self.changed.set()
            case "unusable":
                self.is_hopeless = True
                self._lost(message["why"])
            case _:
                self._answers.put_nowait(message)
