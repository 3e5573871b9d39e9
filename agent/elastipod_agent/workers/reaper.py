"""Collects every exit of every child at once: SIGCHLD wakes the event loop, which reaps all children that have ended.

The agent may be PID 1 of its container and in any case adopts the orphans of its descendants, so it reaps all children. No other part of
this process may wait for children. There is no polling, and no zombie stays.
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
from elastipod_agent.workers.spawner import Spawner, disown

_POLL_S = 1.0


class ChildProcess:
    """A child process of the agent. ``status`` is its exit code, or minus a signal's number; None while it runs."""

    def __init__(self, pid: int, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process
        self.pid = pid
        self.status: int | None = None
        self.ended = asyncio.Event()

    def end(self, status: int) -> None:
        """Record the exit; called by the reaper."""
        if self._process is not None:
            self._process.returncode = status  # it was reaped: Popen must not wait for it
        self.status = status
        self.ended.set()

    def abandon(self) -> None:
        """Leave it to the kernel, which ends it with the spawner."""
        if self._process is not None:
            disown(self._process)

    def send(self, number: int) -> None:
        """Signal only this process, if it still runs. Until it is reaped no other process has its pid."""
        if self.status is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def send_group(self, number: int) -> None:
        """Signal the process group: this process and the descendants that stayed in it."""
        if self.status is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # a fork that has not created its group yet
                self.send(number)
            except PermissionError:
                pass  # every process of the group has another user's rights; only root can end them


class PendingChild(Protocol):
    """A child that was forked and has no program yet."""

    child: ChildProcess

    async def start_program(self, command: Sequence[str], environ: Mapping[str, str], stdout: int, stderr: int) -> None:
        """Start a program in it with this complete environment. Raises OSError if it is dead."""

    def discard(self) -> None:
        """End it, because it is not needed."""


class WorkerForker(Protocol):
    """Forks processes for workers, so that they need no exec."""

    async def fork(self, count: int, cancelled: asyncio.Event) -> Sequence[PendingChild] | None:
        """Give this many processes, or None if workers must be started with an exec."""


class Reaper:
    """Starts children and reaps them and all orphans. Belongs to the main thread with its event loop.

    forker: forks workers, if there is a fork server.
    """

    forker: WorkerForker | None = None

    def __init__(self) -> None:
        self._spawner = Spawner()
        self._num_spawning = 0
        self._children: dict[int, ChildProcess] = {}
        self._unclaimed: dict[int, int] = {}
        self._an_exit = asyncio.Event()

    def start(self) -> None:
        """Start to reap. Raises OSError if the kernel refuses to make this process a subreaper."""
        adopt_orphans()
        self._spawner.start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self.collect)

    def stop(self) -> None:
        """Reap a last time, then ignore SIGCHLD."""
        self.collect()
        for child in self._children.values():
            child.abandon()
        self._spawner.stop()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)

    async def spawn(
        self, command: Sequence[str], env: Mapping[str, str], *, stdout: int, stderr: int, keep: Sequence[int] = ()
    ) -> ChildProcess:
        """Start a command in a session of its own that dies with the agent. Raises OSError if it cannot be run.

        keep: further descriptors that it inherits, under the same numbers.
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
        """Within it, exits of unknown children are kept: they may belong to a child whose pid is not known yet."""
        self._num_spawning += 1
        try:
            yield
        finally:
            self._num_spawning -= 1
            if not self._num_spawning:
                self._unclaimed.clear()  # all children are known; a later one may get such a pid again

    def adopt(self, pid: int) -> ChildProcess:
        """Adopt a child that another process forked. Call within `expecting`, entered before the fork."""
        return self._claim(ChildProcess(pid))

    def _claim(self, child: ChildProcess) -> ChildProcess:
        status = self._unclaimed.pop(child.pid, None)
        if status is None:
            self._children[child.pid] = child
        else:
            child.end(status)
        return child

    def kill_pending_children(self) -> None:
        """Kill a child that hangs between fork and exec; its `spawn` then returns a dead child."""
        if self._num_spawning:
            for pid in self._pending_children():
                os.kill(pid, signal.SIGKILL)

    def _kill_stopped_pending(self, starting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
        """Kill children that were stopped by a signal before their exec: they would block every start."""
        if not starting.done():
            for pid in self._pending_children():
                if process_table.is_stopped(pid):
                    os.kill(pid, signal.SIGKILL)

    def kill_stopped_strays(self, argument: str) -> None:
        """Kill unclaimed children that have this argument and are stopped by a signal.

        They come from a failed fork; other children of that fork end by themselves.
        """
        for pid in self._unclaimed_children():
            is_meant = os.fsencode(argument) in process_table.command_line(pid).split(b"\0")
            if is_meant and process_table.is_stopped(pid):
                os.kill(pid, signal.SIGKILL)

    def _pending_children(self) -> list[int]:
        """Give the children between fork and exec."""
        myself = process_table.command_line(os.getpid())
        return [pid for pid in self._unclaimed_children() if process_table.command_line(pid) == myself]

    def _unclaimed_children(self) -> list[int]:
        me, processes = os.getpid(), process_table.snapshot().values()
        return [one.pid for one in processes if one.parent == me and one.pid not in self._children]

    def collect(self) -> None:
        """Reap every child that has ended."""
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
            self._unclaimed[pid] = status  # perhaps a child whose start was not reported yet

    async def next_exit(self, timeout_s: float) -> None:
        """Wait until a child ends, at most this long."""
        self._an_exit.clear()
        await set_within(self._an_exit, timeout_s)
