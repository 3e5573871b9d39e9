"""Every exit of every child, noticed at once: SIGCHLD wakes the event loop, which collects all that have ended.

The agent may be PID 1 of its container and is the adopter of its descendants' orphans in any case, so it collects
whatever there is; nobody else in this process may wait for children. No polling, and no zombie stays.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from elastipod_agent.waiting import set_within
from elastipod_agent.workers import process_table
from elastipod_agent.workers.linux import adopt_orphans
from elastipod_agent.workers.spawner import Spawner

_POLL_S = 1.0


class ChildProcess:
    """A process that the agent started, or had started. ``status`` is its exit code, or minus a signal's number; None while it runs."""

    def __init__(self, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process
        self.pid = pid
        self.status: int | None = None
        self.ended = asyncio.Event()

    def end(self, status: int) -> None:
        """Note the exit; called by the reaper."""
        if self._process is not None:
            self._process.returncode = status  # it has been waited for: Popen must not try again
        self.status = status
        self.ended.set()

    def send(self, number: int) -> None:
        """Signal the process alone, if it still runs. Until it is reaped its pid is nobody else's."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def send_group(self, number: int) -> None:
        """Signal the process and those of its descendants that stayed in its process group."""
        if self.status is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # a forked one that has not come to make its group
                self.send(number)
            except PermissionError:
                pass  # every process of the group has another user's rights; only root can end them


class PendingChild(Protocol):
    """A child that has a process, but no program yet."""

    child: ChildProcess

    async def start_program(self, command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> None:
        """Give it its program and whole environment. Raises OSError when it is dead."""

    def discard(self) -> None:
        """End it: it is not wanted."""


class WorkerForker(Protocol):
    """A place where processes for workers can be had without an exec."""

    async def fork(self, count: int, cancelled: asyncio.Event) -> Sequence[PendingChild] | None:
        """Give so many, or None when they are to be started with an exec."""


class Reaper:
    """Starts children and collects them and every orphan; belongs to the running event loop's main thread.

    forker: where workers come from, if there is one.
    """

    forker: WorkerForker | None = None

    def __init__(self) -> None:
        self._spawner = Spawner()
        self._num_spawning = 0
        self._children: dict[int, ChildProcess] = {}
        self._unclaimed: dict[int, int] = {}
        self._an_exit = asyncio.Event()

    def start(self) -> None:
        """Begin to collect. Raises OSError when the kernel refuses to hand us orphans."""
        adopt_orphans()
        self._spawner.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.collect)

    def stop(self) -> None:
        """Collect a last time, then leave SIGCHLD alone."""
        self.collect()
        self._spawner.stop()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    async def spawn(
        self, command: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int, keep: Sequence[int] = ()
    ) -> ChildProcess:
        """Start a command in a session of its own, to die with the agent. Raises OSError when it cannot be run.

        keep: descriptors that it inherits besides, under the same numbers.
        """
        with self.expecting():
            starting = asyncio.ensure_future(self._spawner.spawn(command, env, stdout=stdout, stderr=stderr, keep=keep))
            try:
                while not starting.done():
                    await asyncio.wait([starting], timeout=_POLL_S)
                    self._kill_stopped_pending(starting)
            finally:
                starting.cancel()
            process = starting.result()
            return self._claim(ChildProcess(process.pid, process))

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """While it lasts, exits of unknown children are kept: they may be of one whose pid is not known yet."""
        self._num_spawning += 1
        try:
            yield
        finally:
            self._num_spawning -= 1
            if not self._num_spawning:
                self._unclaimed.clear()  # all that were made are known; a later child may get such a pid again

    def adopt(self, pid: int) -> ChildProcess:
        """Take a child over that somebody else has made. To be called while `expecting`, since before it was made."""
        return self._claim(ChildProcess(pid))

    def _claim(self, child: ChildProcess) -> ChildProcess:
        status = self._unclaimed.pop(child.pid, None)
        if status is None:
            self._children[child.pid] = child
        else:
            child.end(status)
        return child

    def kill_pending_children(self) -> None:
        """Kill a child that hangs between fork and exec; its `spawn` then returns, with a child that is dead."""
        if self._num_spawning:
            for pid in self._pending_children():
                os.kill(pid, signal.SIGKILL)

    def _kill_stopped_pending(self, starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
        """A child that somebody stops before its exec would hold up every start."""
        if not starting.done():
            for pid in self._pending_children():
                if process_table.is_stopped(pid):
                    os.kill(pid, signal.SIGKILL)

    def kill_stopped_strays(self, argument: str) -> None:
        """Kill children whom nobody has claimed, who have this argument, and whom somebody has stopped with a signal.

        They come from a fork that failed; others of it end by themselves.
        """
        for pid in self._unclaimed_children():
            is_meant = os.fsencode(argument) in process_table.command_line(pid).split(b"\0")
            if is_meant and process_table.is_stopped(pid):
                os.kill(pid, signal.SIGKILL)

    def _pending_children(self) -> list[int]:
        """Give the children that have been forked, but have not come to their exec."""
        myself = process_table.command_line(os.getpid())
        return [pid for pid in self._unclaimed_children() if process_table.command_line(pid) == myself]

    def _unclaimed_children(self) -> list[int]:
        me, processes = os.getpid(), process_table.snapshot().values()
        return [one.pid for one in processes if one.parent == me and one.pid not in self._children]

    def collect(self) -> None:
        """Collect every child that has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._note(pid, os.waitstatus_to_exitcode(status))
            self._an_exit.set()

    def _note(self, pid: int, status: int) -> None:
        child = self._children.pop(pid, None)
        if child is not None:
            child.end(status)
        elif self._num_spawning:
            self._unclaimed[pid] = status  # perhaps a child whose start has not been told yet

    async def next_exit(self, timeout_s: float) -> None:
        """Wait until something ended, at most this long."""
        self._an_exit.clear()
        await set_within(self._an_exit, timeout_s)
