"""The workers of one generation in this pod: started, signalled, and their ends collected.

Where the store is. The worker with global rank 0 hosts the c10d store on the master port (TORCHELASTIC_USE_AGENT_STORE
is False, so torch's env:// rendezvous does it). The agent would need torch for hosting it, and a helper process with torch
would cost every pod some 200 MiB for what only one of them uses. The price: when rank 0's process ends, the store ends,
so other ranks must not need the store after rank 0 may have left. The library's drain ends with all ranks agreed before
that, and torch's own teardown does not need the store.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastipod.worker_file import ENV_NAME, EventLevel, Progress, WorkerFile
from elastipod_agent.core.exits import WorkerExit
from elastipod_agent.core.requests import Start
from elastipod_agent.core.worker_env import global_rank, worker_env
from elastipod_agent.settings import Settings
from elastipod_agent.workers import process_tree
from elastipod_agent.workers.output import OutputPump, Stream
from elastipod_agent.workers.outputs import open_outputs
from elastipod_agent.workers.reaper import Child, Reaper

_CATCH_UP_S = 0.25
_ENDS_TO_WAIT_S = 30.0


@dataclass(slots=True)
class Worker:
    """One worker process and where its output goes."""

    local_rank: int
    child: Child
    error_file: Path
    streams: list[Stream]
    stderr: Stream | None
    stderr_file: Path | None  # where standard error goes straight into a file
    is_killed: bool = False

    def stderr_tail(self) -> str:
        """Give the last part of what the worker wrote to standard error."""
        if self.stderr is not None:
            return self.stderr.tail.decode("utf-8", "replace")
        if self.stderr_file is not None:
            return _end_of(self.stderr_file)
        return ""


class WorkerGroup:
    """``directory``: private to this generation; holds the worker file and, without --log-dir, the error reports.

    tap: is given what local rank 0 prints, in the output thread.
    """

    def __init__(
        self,
        settings: Settings,
        start: Start,
        directory: Path,
        reaper: Reaper,
        pump: OutputPump,
        *,
        tap: Callable[[bytes], None] | None = None,
    ) -> None:
        self.workers: list[Worker] = []
        self._settings = settings
        self._start = start
        self._directory = directory
        self._reaper = reaper
        self._pump = pump
        self._tap = tap
        self._is_given_up = False
        self._file = WorkerFile.create(directory / "workers", settings.layout.nproc)

    async def spawn(self, base: Mapping[str, str], on_exit: Callable[[], None]) -> None:
        """Start all workers; ``on_exit`` is called at each one's end. Raises OSError; those started then are running."""
        for local_rank in range(self._settings.layout.nproc):
            if self._is_given_up:
                return
            worker = await self._spawn_one(base, local_rank)
            self.workers.append(worker)
            task = asyncio.ensure_future(worker.child.ended.wait())
            task.add_done_callback(lambda _: on_exit())

    def give_up_spawning(self) -> None:
        """Start no more workers, and end the one that is being started, should that hang."""
        self._is_given_up = True
        self._reaper.kill_unborn()

    @property
    def living(self) -> list[Worker]:
        """The workers whose own process still runs."""
        return [worker for worker in self.workers if worker.child.status is None]

    def exits(self) -> list[WorkerExit]:
        """Give the ends so far, by local rank."""
        return [
            WorkerExit(
                local_rank=worker.local_rank,
                status=worker.child.status,
                acknowledged=self._file.acknowledged(worker.local_rank),
                killed=worker.is_killed,
            )
            for worker in self.workers
            if worker.child.status is not None
        ]

    def first_failure(self) -> Worker | None:
        """Give a worker that failed by itself; of several found at once the lowest rank, which torch's reports name too."""
        failed = {one.local_rank for one in self.exits() if one.is_failure}
        return next((worker for worker in self.workers if worker.local_rank in failed), None)

    def raise_event(self, deadline: float, wake_signal: int) -> None:
        """Ask for a drain: the level is stored first, then each worker's own process is woken."""
        self._file.set_event(EventLevel.DRAIN, deadline)
        for worker in self.living:
            worker.child.send(wake_signal)

    def progress(self) -> Progress | None:
        """Give the last report of local rank 0."""
        return self._file.progress(0)

    async def catch_up(self, worker: Worker) -> None:
        """Wait until all that the (dead) worker printed has been read; briefly, should the console be stuck."""
        done = asyncio.wrap_future(self._pump.catch_up(worker.streams))
        await asyncio.wait([done], timeout=_CATCH_UP_S)

    async def end(self, number: int, patience_s: float) -> list[int]:
        """End what is left: the signal to each worker's process group, SIGKILL to all descendants after the patience.

        Gives the pids that even SIGKILL did not end.
        """
        living = self.living
        for worker in living:
            worker.is_killed = True
            worker.child.send_group(number)
        if living and patience_s > 0:
            waits = [asyncio.ensure_future(worker.child.ended.wait()) for worker in living]
            await asyncio.wait(waits, timeout=patience_s)
            for wait in waits:
                wait.cancel()
        sessions = {worker.child.pid for worker in self.workers}
        stuck = await process_tree.end_all(self._reaper, sessions, self._cookie, _ENDS_TO_WAIT_S)
        self._reaper.collect()
        return stuck

    def global_rank(self, worker: Worker) -> int:
        """Give the worker's rank in the whole job."""
        return global_rank(self._start, self._settings.layout, worker.local_rank)

    def close(self) -> None:
        """Let the worker file go."""
        self._file.close()

    @property
    def _cookie(self) -> str:
        return f"{ENV_NAME}={self._file.path}"

    async def _spawn_one(self, base: Mapping[str, str], local_rank: int) -> Worker:
        logs = self._log_directory(local_rank)
        logs.mkdir(parents=True, exist_ok=True)
        error_file = logs / "error.json"
        error_file.unlink(missing_ok=True)
        env = worker_env(
            base,
            self._start,
            self._settings.layout,
            local_rank,
            worker_file=self._file.path,
            error_file=str(error_file),
        )
        tap = self._tap if local_rank == 0 else None
        with open_outputs(self._settings.logs, self._prefix(local_rank), local_rank, logs, tap=tap) as outputs:
            command = self._settings.worker_command(local_rank)
            child = await self._reaper.spawn(command, env, stdout=outputs.stdout_sink, stderr=outputs.stderr_sink)
            streams = outputs.hand_over(self._pump)
        return Worker(local_rank, child, error_file, streams, outputs.stderr, outputs.stderr_file, self._is_given_up)

    def _prefix(self, local_rank: int) -> str:
        rank = global_rank(self._start, self._settings.layout, local_rank)
        return self._settings.logs.prefix.safe_substitute(
            role_name=self._settings.layout.role, rank=rank, local_rank=local_rank
        )

    def _log_directory(self, local_rank: int) -> Path:
        root = self._settings.logs.directory
        if root is None:
            return self._directory / str(local_rank)
        return root / f"attempt_{self._start.fault_count}" / str(local_rank)


def _end_of(path: Path, size: int = 32 * 1024) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
