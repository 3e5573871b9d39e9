"""Keeps one process per local rank at the barrier between runs, whatever happens to the processes.

One level-triggered loop: it reads where every rank is, asks `core.inprocess_restart.plan_gathering` what is missing, does it, and
repeats at the next exit, call or deadline. During a run it waits; `PooledWorkers` supervises the workers then.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elastipod_agent.core.exits import describe_status
from elastipod_agent.core.inprocess_restart import GatheringRank, GatherPlan, RankPosition, plan_gathering
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.core.run_env import before_rank
from elastipod_agent.core.worker_env import pod_env
from elastipod_agent.generation.faults import Fault, describe_worker_failure, failure_without_worker
from elastipod_agent.ipc.run_coordinator import RunCoordinator
from elastipod_agent.runtime import AgentRuntime
from elastipod_agent.scripts import ScriptRunner, failed_script
from elastipod_agent.settings import missing_script
from elastipod_agent.waiting import set_within
from elastipod_agent.workers.failure import describe_error, shorten
from elastipod_agent.workers.group import KILL_AGAIN_S, WorkerGroup, WorkerProcess


@dataclass(slots=True)
class _RankRecord:
    """What the pool remembers of one local rank's processes. last_ended: the last process whose end was recorded."""

    num_failures: int = 0
    gone_at: float = 0.0
    last_ended: WorkerProcess | None = None
    to_be_replaced: bool = False


class WorkerPool:
    """The workers of one pod that live over generations. Belongs to the event loop's thread.

    on_change: called when ranks moved, ended, or were gathered. tap: takes the output of local rank 0 during a run. fault: why
    gathering was given up. stuck: pids that SIGKILL did not end. kept_all_processes: every process has lived through the last run.

    The environment of a worker names the ranks of the last run, or ranks that cannot be used; the ranks that count are the ones that
    the worker receives at the barrier.
    """

    def __init__(self, runtime: AgentRuntime, coordinator: RunCoordinator) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.tap: Callable[[bytes], None] | None = None
        self.fault: Fault | None = None
        self.stuck: list[int] = []
        self.kept_all_processes = False
        self.is_closing = False
        self._runtime = runtime
        self._settings = settings = runtime.settings
        self._log = runtime.log
        self._coordinator = coordinator
        self._directory = runtime.root / "standing"
        self._directory.mkdir(mode=0o700)
        self._start = before_rank(None, _nnodes(runtime.environ))
        self.group = WorkerGroup(
            settings, self._start, self._directory, runtime.reaper, runtime.pump, tap=self._forward_output
        )
        self._script_wake = asyncio.Event()
        self._scripts = ScriptRunner(
            runtime.reaper,
            runtime.pump,
            is_over=lambda: self.is_closing,
            wake=self._script_wake,
            patience_s=settings.shutdown_timeout_s,
        )
        self._ranks = [_RankRecord() for _ in range(settings.layout.nproc)]
        self._is_gathering = True
        self._is_gathered = False
        self._is_killing = False
        self._last_fault: Fault | None = None
        self._clears_data = True
        self._deadline = 0.0
        self._wake = asyncio.Event()
        coordinator.on_position_change = self._position_changed

    @property
    def is_gathered(self) -> bool:
        """True if a run may begin: every rank waits for it, or gathering was given up (see `fault`)."""
        return self._is_gathering and self._is_gathered

    @property
    def has_all_processes(self) -> bool:
        """True if every rank has a living process, at the barrier or on its way, or gathering was given up."""
        is_whole = len(self.group.living) == len(self._ranks) and not self._is_killing
        return self.fault is not None or is_whole

    def release(self, start: StartRequest) -> None:
        """Begin a run. From now on the run handles ranks that end."""
        self._start = start
        self._is_gathering = self._is_gathered = False
        self.kept_all_processes = True
        self.group.begin_run(start)
        self._coordinator.begin_run(start, progress=start.progress, is_fresh=False)

    def recall(self, replace: frozenset[int], *, is_faulty: bool) -> None:
        """End the run: bring all ranks back to the barrier, those in ``replace`` with a new process. May be called again.

        is_faulty: ranks that are still in the run must leave it.
        """
        self._coordinator.end_run(is_faulty=is_faulty)
        self._clears_data = len(replace) == len(self._ranks)
        for local_rank in replace:
            self._ranks[local_rank].to_be_replaced = True
        for record in self._ranks:
            record.num_failures = 0
        for worker in self.group.workers:
            if worker.child.status is not None:  # it ended during the run
                self._ranks[worker.local_rank].last_ended = worker
                self.kept_all_processes = False
        self.fault = None
        self._is_gathering, self._is_gathered = True, False
        self._restart_deadline()
        self._wake.set()

    def note_exit(self) -> None:
        """Plan again. To be called when a worker ends."""
        self._wake.set()
        self.on_change()

    async def run(self) -> None:
        """Keep the workers until `close`, then end them all and remove their files."""
        self._restart_deadline()
        try:
            while not self.is_closing:
                wake_at = await self._gather_once() if self._is_gathering else None
                await self._sleep_until(wake_at)
            await self._end_all()
        finally:
            self.group.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Let `run` end."""
        self.is_closing = True
        self.group.give_up_spawning()
        self._script_wake.set()
        self._wake.set()
        self.on_change()

    # -- gathering -----------------------------------------------------------------------------------------------

    async def _gather_once(self) -> float | None:
        """Do what gathering needs now; gives when to plan again if nothing happens."""
        now = self._now()
        if self._is_gathered:  # a rank that leaves the barrier now gets the full time
            self._restart_deadline()
        for worker in self.group.workers:
            await self._record_end(worker, now)
        plan = plan_gathering(
            [self._rank(index) for index in range(len(self._ranks))], now=now, deadline=self._deadline
        )
        if plan.kill:
            await self._kill(plan)
            return self._now()
        if plan.spawn:
            await self._spawn(plan.spawn)
            return self._now()
        if plan.is_done != self._is_gathered:
            self._is_gathered = plan.is_done
            self.fault = self._last_fault if plan.is_given_up else None
            if self.fault is not None:
                self._log.error("workers fail before they reach the barrier", message=_first_line(self.fault))
            self.on_change()
        return None if self._is_gathered else plan.wake_at

    def _rank(self, local_rank: int) -> GatheringRank:
        record = self._ranks[local_rank]
        is_alive = any(worker.local_rank == local_rank for worker in self.group.living)
        position = self._coordinator.position(local_rank) if is_alive else RankPosition.NO_PROCESS
        if position.is_waiting:
            record.num_failures = 0
        return GatheringRank(
            position=position,
            num_failures=record.num_failures,
            to_be_replaced=record.to_be_replaced and is_alive,
            gone_at=record.gone_at,
        )

    async def _record_end(self, worker: WorkerProcess, now: float) -> None:
        """Count a process that ended by itself before it reached the barrier."""
        record = self._ranks[worker.local_rank]
        if worker.child.status is None or record.last_ended is worker:
            return
        record.last_ended, record.gone_at = worker, now
        self.kept_all_processes = False
        if worker.is_killed:
            return
        failure = replace(
            await describe_worker_failure(self.group, worker), global_rank=None
        )  # it has none between runs
        who = f"local rank {worker.local_rank}"
        if worker.child.status == 0:
            said = f"{who} ended with exit code 0 before it reached hyperpod_barrier()"
            failure = failure_without_worker(
                f"{said}; with --inprocess-restart the script must call it before it trains"
            )
        else:
            _, newline, details = failure.message.partition("\n")
            said = f"{who} ended with {describe_status(worker.child.status)} before it reached hyperpod_barrier()"
            failure = replace(failure, message=shorten(said + newline + details))
        record.num_failures += 1
        self._last_fault = Fault("WorkerCrash", failure)
        self._log.warning(
            "a worker ended between runs", local_rank=worker.local_rank, message=_first_line(self._last_fault)
        )

    async def _kill(self, plan: GatherPlan) -> None:
        number, patience_s = self._settings.shutdown_signal, self._settings.shutdown_timeout_s
        for local_rank in plan.late:
            self._ranks[local_rank].num_failures += 1
        if plan.late:
            number, patience_s = signal.SIGKILL, 0.0
            self._clears_data = True
            late = ", ".join(map(str, sorted(plan.late)))
            what = f"local rank {late} did not reach the barrier within {self._settings.inprocess_timeout_s:g} s"
            self._last_fault = Fault("WorkerUnhealthy", failure_without_worker(what))
            self._log.warning("all workers are restarted", why=what)
        self._is_killing = True  # a process that is being ended takes part in no run
        self.stuck = await self.group.end(number, 0 if number == signal.SIGKILL else patience_s, plan.kill)
        self._is_killing = False
        self.is_closing = self.is_closing or bool(self.stuck)
        for local_rank in plan.kill:
            self._ranks[local_rank].to_be_replaced = False
        self._restart_deadline()

    async def _spawn(self, local_ranks: frozenset[int]) -> None:
        """Start processes, after ending what their predecessors left running. The pre-train script runs before a complete new set."""
        is_whole_set = not self.group.living
        self.kept_all_processes = False
        await self.group.end(signal.SIGKILL, 0, local_ranks)
        try:
            why_not = missing_script(self._settings)
            reason = "StartFailed"
            if why_not is None and is_whole_set:
                why_not, reason = await self._pre_train(), "PreScriptFailed"
            if why_not is None:
                for local_rank in local_ranks:
                    self._coordinator.reset_rank(local_rank, keeps_data=not self._clears_data)
                await self._replace_workers(local_ranks)
                self._restart_deadline()
                return
        except OSError as error:
            why_not, reason = f"the workers could not be started: {describe_error(error)}", "StartFailed"
        self._last_fault = Fault(reason, failure_without_worker(why_not))
        self._log.warning("workers could not be started", message=_first_line(self._last_fault))
        for local_rank in local_ranks:
            self._ranks[local_rank].num_failures += 1
            self._ranks[local_rank].gone_at = self._now()

    async def _replace_workers(self, local_ranks: frozenset[int]) -> None:
        """Start processes. An exec that hangs (on storage that is gone) is ended like a late rank. Raises OSError."""
        spawning = asyncio.ensure_future(
            self.group.replace_workers(self._runtime.environ, self._start, local_ranks, self.note_exit)
        )
        limit_s = self._settings.inprocess_timeout_s
        while not spawning.done():
            await asyncio.wait([spawning], timeout=limit_s)
            if not spawning.done():
                self._runtime.reaper.kill_pending_children()
                limit_s = KILL_AGAIN_S
        spawning.result()

    async def _pre_train(self) -> str | None:
        script = self._settings.pre_script
        if script is None:
            return None
        env = pod_env(self._runtime.environ, self._start, self._settings.layout)
        status, tail = await self._scripts.run(script, "pre-train", env)
        return None if status == 0 or self.is_closing else failed_script(script, status, tail)

    async def _end_all(self) -> None:
        number, patience_s = self._settings.shutdown_signal, self._settings.shutdown_timeout_s
        self.stuck += await self.group.end(number, 0 if number == signal.SIGKILL else patience_s)

    def _restart_deadline(self) -> None:
        self._deadline = self._now() + self._settings.inprocess_timeout_s

    def _forward_output(self, data: bytes) -> None:
        if self.tap is not None:
            self.tap(data)

    def _position_changed(self) -> None:
        self._wake.set()
        self.on_change()

    async def _sleep_until(self, at: float | None) -> None:
        timeout_s = None if at is None else max(0.0, at - self._now())
        await set_within(self._wake, timeout_s)
        self._wake.clear()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _nnodes(environ: Mapping[str, str]) -> int:
    text = environ.get("NNODES", "")
    return int(text) if text.isascii() and text.isdigit() else 1


def _first_line(fault: Fault) -> str:
    return fault.failure.message.partition("\n")[0]
