"""Keeps the processes of a pod's workers over generations, and brings each local rank to the barrier between runs.

One level-triggered loop: it reads where every rank is, asks `core.inprocess_restart.plan_gathering` what is missing, does it, and
repeats at the next exit, call or deadline. During a run it waits; `PooledWorkers` supervises the workers then.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastipod_agent.core.inprocess_restart import GatheringRank, GatherPlan, RankPosition, plan_gathering
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.core.run_env import before_rank
from elastipod_agent.generation.faults import Fault, describe_early_end, failure_without_worker
from elastipod_agent.inprocess.process_starter import ProcessStarter
from elastipod_agent.ipc.run_coordinator import RunCoordinator
from elastipod_agent.runtime import AgentRuntime
from elastipod_agent.waiting import set_within
from elastipod_agent.workers.group import WorkerGroup, WorkerProcess
from elastipod_agent.workers.output_tap import OutputTap


@dataclass(slots=True)
class _RankRecord:
    """What the pool remembers of one local rank's processes.

    deadline: until when the rank has to be at the barrier, monotonic. last_ended: the last process whose end was recorded. is_renewed:
    its process has not lived through the last run, or not to the end of the present one. is_building: its process was new when the run
    began, and still on its way to the barrier. was_waiting: it needed nothing but a start
    when the pool planned last.
    """

    num_failures: int = 0
    deadline: float = 0.0
    is_renewed: bool = True
    is_building: bool = False
    gone_at: float = 0.0
    last_ended: WorkerProcess | None = None
    to_be_replaced: bool = False
    was_waiting: bool = False


class WorkerPool:
    """The workers of one pod that live over generations. Belongs to the event loop's thread.

    group: the processes, for which `directory` is. start: the run that they are in, or ranks that cannot be used before the first. tap:
    forwards the output of local rank 0 to the run. return_limit_s: how long a rank may take to come back from a run. is_standing: the
    pool lives as long as the agent, and replaces processes that are late. Otherwise it ends with them, and the next generation starts
    its own. is_preparing: the processes are still to be started, ahead of their first run; when one of them ends before that run, all
    do, and ``has_failed`` says so, because a script may need to know its rank before it comes to the barrier.

    on_change: called when ranks moved, ended, or were gathered. on_renewal: called when a process has ended between two runs. fault:
    why gathering was given up. stuck: pids that SIGKILL did not end.

    The environment of a worker names the ranks of the last run, or ranks that cannot be used; the ranks that count are the ones that
    the worker receives at the barrier.
    """

    def __init__(
        self,
        runtime: AgentRuntime,
        coordinator: RunCoordinator,
        *,
        group: WorkerGroup,
        directory: Path,
        start: StartRequest,
        tap: OutputTap,
        return_limit_s: float,
        is_standing: bool,
        is_preparing: bool = False,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self.on_renewal: Callable[[], None] = lambda: None
        self.group = group
        self.tap = tap
        self.left = asyncio.Event()  # no run reads the files of the group
        self.left.set()
        self.fault: Fault | None = None
        self.stuck: list[int] = []
        self.is_closing = False
        self.is_preparing = is_preparing
        self.has_failed = False
        self._settings = settings = runtime.settings
        self._log = runtime.log
        self._coordinator = coordinator
        self._directory = directory
        self._start = start
        self._return_limit_s = self._limit_s = return_limit_s
        self._is_standing = is_standing
        self._starter = ProcessStarter(runtime, group, lambda: self.is_closing)
        has_none = is_standing or is_preparing
        self._ranks = [_RankRecord(is_renewed=has_none) for _ in range(settings.layout.nproc)]
        self._is_gathering = has_none
        self._is_gathered = False
        self._is_killing = False
        self._to_succeed: frozenset[int] = frozenset()
        self._last_fault: Fault | None = None
        self._clears_data = True
        self._wake = asyncio.Event()
        group.notify_exits(self.note_change)
        coordinator.on_position_change = self.note_change

    @classmethod
    def standing(cls, runtime: AgentRuntime, coordinator: RunCoordinator) -> WorkerPool:
        """Make the pool of an agent whose workers start before any run."""
        directory, tap = runtime.root / "standing", OutputTap()
        directory.mkdir(mode=0o700)
        start = before_rank(None, _nnodes(runtime.environ))
        group = WorkerGroup(runtime.settings, start, directory, runtime.reaper, runtime.pump, tap=tap)
        return cls(
            runtime, coordinator, group=group, directory=directory, start=start, tap=tap,
            return_limit_s=runtime.settings.inprocess_timeout_s, is_standing=True,
        )  # fmt: skip

    @classmethod
    def prepared(
        cls,
        runtime: AgentRuntime,
        coordinator: RunCoordinator,
        directory: Path,
        start: StartRequest,
        return_limit_s: float,
    ) -> WorkerPool:
        """Make the pool of workers that start ahead of their first run. start: has no rank yet."""
        directory.mkdir(mode=0o700)
        tap = OutputTap()
        group = WorkerGroup(runtime.settings, start, directory, runtime.reaper, runtime.pump, tap=tap)
        return cls(
            runtime, coordinator, group=group, directory=directory, start=start, tap=tap,
            return_limit_s=return_limit_s, is_standing=False, is_preparing=True,
        )  # fmt: skip

    @property
    def num_kept(self) -> int:
        """How many processes have lived through the last run."""
        return sum(not record.is_renewed for record in self._ranks)

    @property
    def kept_all_processes(self) -> bool:
        """True if every process has lived through the last run."""
        return self.num_kept == len(self._ranks)

    @property
    def is_gathered(self) -> bool:
        """True if a run may begin: every rank waits for it, or gathering was given up (see `fault`)."""
        return self._is_gathering and self._is_gathered

    @property
    def has_all_processes(self) -> bool:
        """True if every rank has a living process that stays, at the barrier or on its way, or gathering was given up."""
        is_ending = self._is_killing or any(record.to_be_replaced for record in self._ranks)
        is_whole = len(self.group.living) == len(self._ranks) and not is_ending
        return self.fault is not None or is_whole

    @property
    def is_renewed(self) -> bool:
        """True if every process is new and comes to the barrier for its first run: this pod holds nothing from the runs before."""
        return not self._is_standing and self.num_kept == 0

    @property
    def may_get_start(self) -> bool:
        """True if the agent may take the next start: no rank is still in the last run. New processes may be on their way."""
        return self.is_gathered or (self.is_renewed and self.has_all_processes)

    @property
    def is_releasable(self) -> bool:
        """True if a run may begin: every rank has a process. New ones have come as far as the barrier once."""
        return self.has_all_processes and (self.is_gathered or not self.is_renewed)

    def release(self, start: StartRequest) -> None:
        """Begin a run. From now on the run handles ranks that end."""
        self.is_preparing = False
        self._start = start
        self._is_gathering = self._is_gathered = False
        for index, record in enumerate(self._ranks):
            record.is_building = record.is_renewed and not self._coordinator.position(index).is_waiting
            record.is_renewed = record.was_waiting = False
        self.group.begin_run(start)
        self._coordinator.begin_run(start, progress=start.progress, is_fresh=False)

    def recall(self, replace: frozenset[int], *, is_faulty: bool, within_s: float | None = None) -> None:
        """End the run: bring all ranks back to the barrier, those in ``replace`` with a new process. May be called again.

        is_faulty: ranks that are still in the run must leave it. within_s: the time for that, where it is shorter than usual.
        """
        for index, record in enumerate(self._ranks):
            if record.is_building and not self._coordinator.has_joined(index):
                record.is_renewed = True  # it was in no run yet, and gets the time of a new process
        self._coordinator.end_run(is_faulty=is_faulty)
        self._clears_data = len(replace) == len(self._ranks)
        for local_rank in replace:
            self._ranks[local_rank].to_be_replaced = True
        for record in self._ranks:
            record.num_failures = 0
        for worker in self.group.workers:
            if worker.child.status is not None and not self._ranks[worker.local_rank].is_renewed:
                self._note_end_in_run(worker)
        self.fault = None
        self._to_succeed = frozenset()  # gathering starts what is missing
        self._is_gathering, self._is_gathered = True, False
        self._limit_s = self._return_limit_s if within_s is None else min(within_s, self._return_limit_s)
        new = frozenset(index for index, record in enumerate(self._ranks) if record.is_renewed)
        self._restart_deadlines(self._limit_s, frozenset(range(len(self._ranks))) - new)
        self._restart_deadlines(self._settings.inprocess_timeout_s, new)
        self._wake.set()

    def begin_successors(self) -> None:
        """Start the successors of ranks that died in the run, before the stop says what becomes of the others. To be called once in a run.

        They import and build meanwhile, and wait at the barrier for the next run. A stop that goes deeper ends them with the others.
        Where a pre-train script comes before a complete new set of processes, nothing is started before it is known whether there
        will be one.
        """
        if self._is_standing or self._is_gathering or self.is_closing or self._settings.pre_script is not None:
            return
        dead = [worker for worker in self.group.workers if worker.child.status is not None]
        for worker in dead:
            self._note_end_in_run(worker)
        self._to_succeed = frozenset(worker.local_rank for worker in dead)
        names = ", ".join(str(worker.local_rank) for worker in dead)
        self._log.info("successors of dead workers are started", local_ranks=names)
        self._wake.set()

    async def end_culprits(self, local_ranks: frozenset[int]) -> None:
        """Kill ranks that hang, so that their peers' collectives fail, where other ranks can go on with what they hold in memory."""
        if self._is_standing or not local_ranks:
            return
        self._log.warning("workers that hang are killed", local_ranks=", ".join(map(str, sorted(local_ranks))))
        self.stuck = await self.group.end(signal.SIGKILL, 0, local_ranks)
        self.is_closing = self.is_closing or bool(self.stuck)

    def note_change(self) -> None:
        """Plan again. To be called when a worker ends, or changes its position."""
        self._wake.set()
        self.on_change()

    async def run(self) -> None:
        """Keep the workers until `close`, then end them all and remove their files."""
        self._restart_deadlines(self._settings.inprocess_timeout_s)
        try:
            while not self.is_closing:
                wake_at = None
                if self._is_gathering:
                    wake_at = await self._gather_once()
                else:
                    await self._start_successors()
                await self._sleep_until(wake_at)
            await self._end_all()
            await self.left.wait()  # the run ends as well, because the pool is closing
        finally:
            self.group.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Let `run` end."""
        self.is_closing = True
        self._starter.close()
        self._wake.set()
        self.on_change()

    # -- gathering -----------------------------------------------------------------------------------------------

    async def _gather_once(self) -> float | None:
        """Do what gathering needs now; gives when to plan again if nothing happens."""
        now = self._now()
        # A rank that leaves the barrier now gets the full time. It leaves for a moment, too, whenever it asks again for the start.
        waited = [index for index, record in enumerate(self._ranks) if record.was_waiting]
        self._restart_deadlines(self._settings.inprocess_timeout_s, waited)
        for worker in self.group.workers:
            await self._record_end(worker, now)
        plan = plan_gathering([self._rank(index) for index in range(len(self._ranks))], now=now)
        if plan.late:
            self._note_late(plan.late)
        if not self._is_standing and (plan.late or plan.is_given_up or self._cannot_be_prepared(plan)):
            what = "prepared" if self.is_preparing else "kept"
            self._log.warning(f"the {what} workers are ended", why=_first_line(self._last_fault))
            self.has_failed = True
            self.close()
            return None
        if plan.kill or plan.spawn:
            self._is_gathered = False  # a run that began meanwhile would not be one that the new process waits for
        if plan.kill:
            await self._kill(plan)
            return self._now()
        if plan.spawn:
            await self._spawn(plan.spawn)
            self.on_change()
            return self._now()
        if plan.is_done != self._is_gathered:
            self._is_gathered = plan.is_done
            self.fault = self._last_fault if plan.is_given_up else None
            if self.fault is not None:
                self._log.error("workers fail before they reach the barrier", message=_first_line(self.fault))
            self.on_change()
        return None if self._is_gathered else plan.wake_at

    def _cannot_be_prepared(self, plan: GatherPlan) -> bool:
        if not self.is_preparing:
            return False
        if plan.is_done and self._coordinator.kept_state is None:
            told = "they wait at the barrier, but have not announced with `keep` that they can live through several generations"
            self._last_fault = Fault("WorkerUnhealthy", failure_without_worker(told))
            return True
        return any(record.num_failures for record in self._ranks)

    def _rank(self, local_rank: int) -> GatheringRank:
        record = self._ranks[local_rank]
        is_alive = any(worker.local_rank == local_rank for worker in self.group.living)
        position = self._coordinator.position(local_rank) if is_alive else RankPosition.NO_PROCESS
        record.was_waiting = position.is_waiting
        if position.is_waiting:
            record.num_failures = 0
        return GatheringRank(
            position=position,
            num_failures=record.num_failures,
            to_be_replaced=record.to_be_replaced and is_alive,
            gone_at=record.gone_at,
            deadline=record.deadline,
        )

    def _note_end_in_run(self, worker: WorkerProcess) -> None:
        """Remember that a process ended in its run, so that it does not count as one that ended on its way to the barrier."""
        record = self._ranks[worker.local_rank]
        record.last_ended, record.is_renewed = worker, True

    async def _record_end(self, worker: WorkerProcess, now: float) -> None:
        """Count a process that ended by itself before it reached the barrier."""
        record = self._ranks[worker.local_rank]
        if worker.child.status is None or record.last_ended is worker:
            return
        record.last_ended, record.gone_at, record.is_renewed = worker, now, True
        self.on_renewal()
        if worker.is_killed:
            return
        record.num_failures += 1
        self._last_fault = Fault("WorkerCrash", await describe_early_end(self.group, worker))
        self._log.warning(
            "a worker ended between runs", local_rank=worker.local_rank, message=_first_line(self._last_fault)
        )

    async def _kill(self, plan: GatherPlan) -> None:
        number, patience_s = self._settings.shutdown_signal, self._settings.shutdown_timeout_s
        if plan.late:
            number, patience_s = signal.SIGKILL, 0.0
            self._clears_data = True
            self._log.warning("all workers are restarted", why=_first_line(self._last_fault))
        self._is_killing = True  # a process that is being ended takes part in no run
        self.stuck = await self.group.end(number, 0 if number == signal.SIGKILL else patience_s, plan.kill)
        self._is_killing = False
        self.is_closing = self.is_closing or bool(self.stuck)
        for local_rank in plan.kill:
            self._ranks[local_rank].to_be_replaced = False

    def _note_late(self, late: frozenset[int]) -> None:
        for local_rank in late:
            self._ranks[local_rank].num_failures += 1
        is_back_late = all(not self._ranks[local_rank].is_renewed for local_rank in late)
        limit_s = self._limit_s if is_back_late else self._settings.inprocess_timeout_s
        what = f"local rank {', '.join(map(str, sorted(late)))} did not reach the barrier within {limit_s:g} s"
        self._last_fault = Fault("WorkerUnhealthy", failure_without_worker(what))

    async def _start_successors(self) -> None:
        local_ranks, self._to_succeed = self._to_succeed, frozenset()
        if local_ranks:
            self._clears_data = False
            await self._spawn(local_ranks)
            self.on_change()  # the run may have ended meanwhile, and waits for processes

    async def _spawn(self, local_ranks: frozenset[int]) -> None:
        for local_rank in local_ranks:
            record = self._ranks[local_rank]
            record.is_renewed, record.was_waiting = True, False
            record.to_be_replaced = False  # its new process is the replacement
        fault = await self._starter.start(self._start, local_ranks, self._reset_rank)
        if fault is None:
            self._restart_deadlines(self._settings.inprocess_timeout_s, local_ranks)
            return
        self._last_fault = fault
        self._log.warning("workers could not be started", message=_first_line(fault))
        for local_rank in local_ranks:
            self._ranks[local_rank].num_failures += 1
            self._ranks[local_rank].gone_at = self._now()

    def _reset_rank(self, local_rank: int) -> None:
        self._coordinator.reset_rank(local_rank, keeps_data=not self._clears_data)

    async def _end_all(self) -> None:
        number, patience_s = self._settings.shutdown_signal, self._settings.shutdown_timeout_s
        self.stuck += await self.group.end(number, 0 if number == signal.SIGKILL else patience_s)

    def _restart_deadlines(self, limit_s: float, local_ranks: Collection[int] | None = None) -> None:
        for index, record in enumerate(self._ranks):
            if local_ranks is None or index in local_ranks:
                record.deadline = self._now() + limit_s

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


def _first_line(fault: Fault | None) -> str:
    return "" if fault is None else fault.failure.message.partition("\n")[0]
