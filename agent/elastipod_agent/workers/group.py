"""The workers of one generation in this pod: starts them, signals them, and collects their exits.

The worker with global rank 0 hosts the c10d store on the master port (TORCHELASTIC_USE_AGENT_STORE is False, so torch's env:// rendezvous
starts it). The agent would need torch to host it, and a helper process with torch would cost every pod some 200 MiB that only one pod
uses. In return the store ends with the process of rank 0, so other ranks must not need it after rank 0 may have exited. In a drain all
ranks have agreed before that, and torch's own teardown does not need the store.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from elastipod.worker_file import WORKER_FILE_ENV, EventLevel, Progress, WorkerFile
from elastipod_agent.core.exits import WorkerExit
from elastipod_agent.core.hang import HangDetector
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.core.worker_env import global_rank, worker_env
from elastipod_agent.log_settings import LogSettings
from elastipod_agent.metrics import METRICS
from elastipod_agent.settings import Settings
from elastipod_agent.topology import bind
from elastipod_agent.waiting import in_thread
from elastipod_agent.workers import process_tree
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.process_table import catches
from elastipod_agent.workers.reaper import ChildProcess, PendingChild, Reaper
from elastipod_agent.workers.worker_output import WorkerOutput, open_worker_output
from elastipod_agent.workers.worker_process import WorkerProcess as WorkerProcess

Tap = Callable[[bytes], None]

KILL_AGAIN_S = 0.2  # between two attempts to end a worker that hangs in its start
_LAST_WORDS_S = 2.0  # how long the output of a worker that failed is waited for
_ENDS_TO_WAIT_S = 30.0


class WorkerGroup:
    """The processes of one pod's workers.

    directory: private to this group; holds the worker file and, without --log-dir, the error reports. tap: called with the output of
    local rank 0, in the output thread, if there was a tap when its process was started. hangs: what is known of the pace of the processes,
    over all generations.
    """

    def __init__(
        self,
        settings: Settings,
        start: StartRequest,
        directory: Path,
        reaper: Reaper,
        pump: OutputPump,
        *,
        tap: Tap | None = None,
    ) -> None:
        self.workers: list[WorkerProcess] = []
        self.tap = tap
        self.hangs = HangDetector(settings.hang_timeout_s)
        self._settings = settings
        self._start = start
        self._directory = directory
        self._reaper = reaper
        self._pump = pump
        self._given_up = asyncio.Event()
        self._wake_signal: int | None = None  # of the event that was raised
        self._num_replacements = 0
        self._lacks_files = False  # of the workers that are being started
        self._on_exit: Callable[[], None] = lambda: None
        self._file = WorkerFile.create(directory / "workers", settings.layout.nproc)

    async def spawn(self, base: Mapping[str, str], on_exit: Callable[[], None]) -> None:
        """Start all workers; ``on_exit`` is called when one ends. Raises OSError; workers that were started keep running then."""
        self.notify_exits(on_exit)
        await self._spawn_all(base, range(self._settings.layout.nproc))

    def notify_exits(self, on_exit: Callable[[], None]) -> None:
        """Call this, and nothing else, when a worker ends."""
        self._on_exit = on_exit

    async def replace_workers(self, base: Mapping[str, str], start: StartRequest, local_ranks: Collection[int]) -> None:
        """Start or restart these workers, whose previous processes have ended. Raises OSError.

        For workers that live over generations: each process after the first one gets a log directory of its own.
        """
        self._start = start
        await self._spawn_all(base, sorted(local_ranks), is_replacement=True)

    def begin_run(self, start: StartRequest) -> None:
        """Begin the next generation of workers that live over generations: new ranks, and no event."""
        self._start = start
        self._wake_signal = None
        self._file.reset_run()

    def give_up_spawning(self) -> None:
        """Start no more workers, and end a worker that hangs in its start."""
        self._given_up.set()
        self._reaper.kill_pending_children()

    @property
    def living(self) -> list[WorkerProcess]:
        """The workers whose process is alive."""
        return [worker for worker in self.workers if worker.child.status is None]

    def exits(self) -> list[WorkerExit]:
        """Give the exits so far, by local rank."""
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

    def first_failure(self) -> WorkerProcess | None:
        """Give a worker that failed; of several the one with the lowest rank, which torch's reports name too."""
        failed = {one.local_rank for one in self.exits() if one.is_failure}
        return next((worker for worker in self.workers if worker.local_rank in failed), None)

    @property
    def has_tap(self) -> bool:
        """True if the output of the process that local rank 0 has now can be read."""
        return any(worker.has_tap for worker in self.workers if worker.local_rank == 0)

    def raise_event(self, timeout_s: float, wake_signal: int, *, leaves: bool | None, kept: bool | None) -> None:
        """Ask for a drain: store the event level, then send the signal to each worker, also to workers that start later."""
        steady_deadline = time.monotonic() + timeout_s
        self._file.set_event(
            EventLevel.DRAIN, time.time() + timeout_s, leaves=leaves, kept=kept, steady_deadline=steady_deadline
        )
        self._wake_signal = wake_signal
        for worker in self.living:
            worker.child.send(wake_signal)

    def answers_events(self, wake_signal: int) -> bool:
        """Tell whether an event can reach a worker.

        A worker has asked for events since it was started, or a process of the workers handles the signal. A shell or a launcher may be
        between the agent and the script, and a script may handle the signal itself.
        """
        if any(
            self._file.checks_events(worker.local_rank) or self._file.acknowledged(worker.local_rank)
            for worker in self.workers
        ):
            return True
        sessions = {worker.child.pid for worker in self.workers}
        return any(catches(pid, wake_signal) for pid in process_tree.members(sessions, self._cookie))

    @property
    def file(self) -> WorkerFile:
        """The worker file, which this group's workers and the agent share."""
        return self._file

    def progress(self) -> Progress | None:
        """Give the last report of local rank 0."""
        return self._file.progress(0)

    async def catch_up(self, worker: WorkerProcess) -> None:
        """Wait until all output of a worker that has ended was read, also if the console is slow: it says why the worker failed."""
        await self._pump.caught_up(worker.streams, _LAST_WORDS_S)

    async def end(self, number: int, patience_s: float, only: Collection[int] | None = None) -> list[int]:
        """End workers: send the signal to each process group, and SIGKILL to all descendants after ``patience_s``.

        number: the signal; of SIGKILL patience_s is 0. only: local ranks to end, None for all. Gives the pids that SIGKILL did not end.
        """
        workers = [worker for worker in self.workers if only is None or worker.local_rank in only]
        living = [worker for worker in workers if worker.child.status is None]
        for worker in living:
            worker.is_killed = True
            if number != signal.SIGKILL:  # `end_all` kills too, but not what frees the resources of the others
                worker.child.send_group(number)
        await _all_reaped(living, patience_s)
        deadline = time.monotonic() + _ENDS_TO_WAIT_S
        cookies = [self._cookie] if only is None else [f"TORCHELASTIC_ERROR_FILE={w.error_file}" for w in workers]
        sessions = {worker.child.pid for worker in workers}
        stuck: list[int] = []
        for cookie in cookies:
            stuck += await process_tree.end_all(self._reaper, sessions, cookie, _ENDS_TO_WAIT_S)
        self._reaper.collect()
        await _all_reaped(workers, deadline - time.monotonic())
        return sorted({*stuck, *(worker.child.pid for worker in workers if worker.child.status is None)})

    def global_rank(self, worker: WorkerProcess) -> int:
        """Give the worker's rank in the whole job."""
        return global_rank(self._start, self._settings.layout, worker.local_rank)

    def close(self) -> None:
        """Close the worker file."""
        self._file.close()

    @property
    def _cookie(self) -> str:
        return f"{WORKER_FILE_ENV}={self._file.path}"

    async def _spawn_all(
        self, base: Mapping[str, str], local_ranks: Collection[int], *, is_replacement: bool = False
    ) -> None:
        self._lacks_files = False
        forker = self._reaper.forker
        forked = None if forker is None else await forker.fork(len(local_ranks), self._given_up)
        waiting = list(forked or ())
        try:
            for local_rank in local_ranks:
                if self._given_up.is_set():
                    return
                self._num_replacements += is_replacement
                worker = await self._spawn_one(base, local_rank, waiting.pop(0) if waiting else None)
                if worker is None:
                    return
                others = [one for one in self.workers if one.local_rank != local_rank]
                self.workers = sorted([*others, worker], key=lambda one: one.local_rank)
                if self._wake_signal is not None:
                    worker.child.send(self._wake_signal)
                task = asyncio.ensure_future(worker.child.ended.wait())
                task.add_done_callback(lambda _: self._on_exit())
        finally:
            for pending in waiting:
                pending.discard()

    async def _spawn_one(
        self, base: Mapping[str, str], local_rank: int, pending: PendingChild | None
    ) -> WorkerProcess | None:
        """Start one worker; None when spawning was given up while its files were opened. Raises OSError."""
        tap = self.tap if local_rank == 0 else None
        error_file, opened = await self._open_output(local_rank, tap)
        if self._given_up.is_set():
            opened.close()
            if pending is not None:
                pending.discard()
            return None
        self._file.set_checks_events(local_rank, checks=False)  # the previous process did
        reports_before = self._file.num_reports(local_rank)
        env = worker_env(
            base,
            self._start,
            self._settings.layout,
            local_rank,
            worker_file=self._file.path,
            error_file=str(error_file),
        )
        with closing(opened) as outputs:
            command = self._settings.worker_command(local_rank)
            if pending is not None:
                self._bind(pending.child, local_rank)
            child = await self._start_process(command, env, outputs, pending)
            self._bind(child, local_rank)
            streams = outputs.hand_over(self._pump)
        return WorkerProcess(
            local_rank, child, error_file, streams, outputs.stderr, outputs.stderr_file,
            is_killed=self._given_up.is_set(), has_tap=tap is not None, reports_before=reports_before,
        )  # fmt: skip

    async def _open_output(self, local_rank: int, tap: Tap | None) -> tuple[Path, WorkerOutput]:
        """Open a worker's output; gives its error file too. Without files of --log-dir if its storage is full or hangs. Raises OSError."""
        if self._settings.logs.directory is not None and not self._lacks_files:
            directory = self._log_directory(self._settings.logs.directory, local_rank)
            work = partial(self._open_files, self._settings.logs, directory, local_rank, tap)
            try:
                return await in_thread(work, discard=lambda late: late[1].close())
            except OSError as error:
                self._lacks_files = True
                self._pump.print_line(
                    f"hyperpodrun: the output of workers goes to the console only, because files in {directory} cannot be "
                    f"opened: {error.strerror}"
                )
        logs = self._settings.logs.without_files()
        return self._open_files(logs, self._directory / str(local_rank), local_rank, tap)

    def _open_files(
        self, logs: LogSettings, directory: Path, local_rank: int, tap: Tap | None
    ) -> tuple[Path, WorkerOutput]:
        directory.mkdir(parents=True, exist_ok=True)
        error_file = directory / "error.json"
        error_file.unlink(missing_ok=True)
        return error_file, open_worker_output(logs, self._prefix(local_rank), local_rank, directory, tap=tap)

    def _bind(self, child: ChildProcess, local_rank: int) -> None:
        if self._settings.cpus:
            bind(child.pid, self._settings.cpus[local_rank])

    async def _start_process(
        self, command: Sequence[str], env: Mapping[str, str], outputs: WorkerOutput, pending: PendingChild | None
    ) -> ChildProcess:
        """Start one worker, from a forked process if there is one. Raises OSError."""
        if pending is not None:
            with suppress(OSError):  # it is dead: start the worker with an exec
                await pending.start_program(command, env, outputs.stdout_sink, outputs.stderr_sink)
                METRICS.count("worker_starts_total", kind="warm")
                return pending.child
        child = await self._reaper.spawn(command, env, stdout=outputs.stdout_sink, stderr=outputs.stderr_sink)
        METRICS.count("worker_starts_total", kind="cold")
        return child

    def _prefix(self, local_rank: int) -> str:
        rank = global_rank(self._start, self._settings.layout, local_rank)
        return self._settings.logs.prefix.safe_substitute(
            role_name=self._settings.layout.role, rank=rank, local_rank=local_rank
        )

    def _log_directory(self, root: Path, local_rank: int) -> Path:
        renewed = f".{self._num_replacements}" if self._num_replacements else ""
        return root / f"attempt_{self._start.fault_count}{renewed}" / str(local_rank)


async def _all_reaped(workers: Collection[WorkerProcess], limit_s: float) -> None:
    """Wait until the exit of each is known, at most this long."""
    living = [worker for worker in workers if worker.child.status is None]
    if not living or limit_s <= 0:
        return
    waits = [asyncio.ensure_future(worker.child.ended.wait()) for worker in living]
    await asyncio.wait(waits, timeout=limit_s)
    for wait in waits:
        wait.cancel()
