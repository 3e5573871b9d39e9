"""The agent of one pod: carries out the operator's calls, runs one generation after the other, and leaves in order.

A generation from top to bottom: `start` (a /start) creates its supervisor, `_run_generation` runs it to its end, a fault on the way
goes to `_on_fault`, `stop` (a /stop) drains or ends the workers, and `StatusReporter.ended` enters the state that the end means.
"""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from elastipod.ipc.protocol import SOCKET_ENV, WORKER_KEY_ENV, RestartMode
from elastipod.worker_file import Progress
from elastipod_agent import __version__
from elastipod_agent.clock import utc_now
from elastipod_agent.core.exits import Outcome, StopMode, agent_exit_code, signal_name
from elastipod_agent.core.fences import (
    CallDecision,
    CallVerdict,
    FenceState,
    decide_prepare,
    decide_start,
    decide_stop,
    decide_update,
)
from elastipod_agent.core.inprocess_restart import keeps_processes, parse_restart_mode, ranks_to_replace
from elastipod_agent.core.requests import PrepareRequest, StartRequest, StopRequest, UpdateRequest
from elastipod_agent.core.run_env import before_generation
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.fork_server.fork_server_manager import ForkServerManager
from elastipod_agent.generation.faults import Fault, GenerationEnd
from elastipod_agent.generation.gap import measure_gap
from elastipod_agent.generation.generation_run import GenerationRun, RunEvents
from elastipod_agent.generation.supervisor import GenerationSupervisor
from elastipod_agent.inprocess.keepable_workers import KeepableWorkers
from elastipod_agent.inprocess.kept_pool import KeptPool
from elastipod_agent.inprocess.pooled_workers import PooledWorkers
from elastipod_agent.inprocess.worker_pool import WorkerPool
from elastipod_agent.ipc.link import SOCKET_NAME, WorkerLink
from elastipod_agent.log import EventLog
from elastipod_agent.runtime import AgentRuntime
from elastipod_agent.server.store_server import StoreServer
from elastipod_agent.settings import Settings
from elastipod_agent.status import FEATURES, StatusStore
from elastipod_agent.status_reporter import StatusReporter
from elastipod_agent.workers.failure import write_termination_message
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper

# How long the end of a run can still be read once the pod is being terminated; an operator's /shutdown makes it shorter.
FINAL_STATUS_S = 5.0
# How long kept workers of a pod that is being terminated give their state to others, unless a /shutdown or the pod's end comes first.
GIVING_LIMIT_S = 120.0

T = TypeVar("T")


class Agent:
    """Everything between the control API and the processes. All methods belong to the event loop's thread.

    root: a private folder for the files of generations, each removed with its generation.
    """

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], root: Path, pump: OutputPump, log: EventLog
    ) -> None:
        self.status = StatusStore(utc_now)
        self.log = log
        self._settings = settings
        self._reaper = Reaper()
        environ = {**environ, SOCKET_ENV: str(root / SOCKET_NAME)}
        self._runtime = AgentRuntime(
            settings=settings, root=root, environ=environ, reaper=self._reaper, pump=pump, log=log
        )
        self._fork_server = ForkServerManager(settings, environ, self._reaper, pump, log)
        self._link = WorkerLink(settings.layout, environ, root, self.status, self._on_reported_fault)
        self._coordinator = self._link.coordinator
        usual = RestartMode.IN_PROCESS_RESTART if settings.is_inprocess else RestartMode.PROCESS_LEVEL_RESTART
        self._usual_mode = usual
        self._reporter = StatusReporter(self.status, log, usual, self._link.reported)
        self._store: StoreServer | None = None
        self._pool: WorkerPool | None = None  # with --inprocess-restart
        self._kept = KeptPool(
            self._runtime, self._coordinator, self._guarded, self._kept_workers_changed, self._reporter.preparation
        )
        self._pool_task: asyncio.Task[None] | None = None
        self._supervisor: GenerationSupervisor | None = None
        self._task: asyncio.Task[None] | None = None
        self._newest_stopped = 0
        self._next_start: StartRequest | None = None  # carried out once the workers have drained
        self._last_outcome: Outcome | None = None
        self._last_report: Progress | None = None  # of an earlier generation
        self._shutdown_requested = asyncio.Event()
        self._exit_signal: int | None = None
        self._has_failed = False

    def give_workers(self, key: str, store: StoreServer) -> None:
        """Give workers that can be kept a key under which those of the job know each other, and a store to meet at; "" for neither."""
        if key:
            self._coordinator.keep_env |= {WORKER_KEY_ENV: key}
            self._store = store
            self.status.features = (*FEATURES, "store")

    # -- the life of the agent -------------------------------------------------------------------------------------

    async def start_up(self, port: int) -> None:
        """Take over children and signals, and become READY. The server already listens, on this port."""
        loop = asyncio.get_running_loop()
        self._reaper.start()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # inherited: the event must not kill a worker that never asks
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, self._on_interrupt, number)
        if self._settings.is_warm:
            self._reaper.forker = self._fork_server
            is_warming = self._fork_server.begin(lambda: self.status.set(warming=False))
            self.status.set(warming=is_warming)
        await self._link.listen()
        if self.status.current.state is not S.INIT:
            return  # a shutdown was requested meanwhile
        if self._settings.is_inprocess:
            self._pool = self._reporter.pool = WorkerPool.standing(self._runtime, self._coordinator)
            self._pool.on_change = self._reporter.workers_gathered
            self._pool.on_renewal = self._reporter.workers_renewed
            self._pool_task = asyncio.ensure_future(self._guarded(self._pool.run()))
        self._reporter.ready()
        event = "ready" if self._pool is None else "listening; workers are on their way to the barrier"
        self.log.info(event, version=__version__, port=port, nproc=self._settings.layout.nproc)

    async def run_until_shutdown(self) -> int:
        """Wait for /shutdown or a signal, end what runs, and give the exit code of the process."""
        await self._shutdown_requested.wait()
        is_faulted = self._has_failed or self.status.current.failure is not None
        tasks = (self._task, self._pool_task, self._kept.task)
        left = [task for task in tasks if task is not None and not task.done()]
        if left:
            await asyncio.wait(left, timeout=self._settings.server_shutdown_timeout_s)
        await self._link.close()
        await self._fork_server.end()
        self._reaper.stop()
        code = agent_exit_code(self._last_outcome, is_faulted=is_faulted, exit_signal=self._exit_signal)
        self.log.info("gone", exit_code=code)
        return code

    def status_json(self) -> dict[str, Any]:
        """Give the body of /status."""
        return self.status.as_json(None if self._supervisor is None else self._supervisor.progress())

    # -- the life of a generation ----------------------------------------------------------------------------------

    def start(self, request: StartRequest) -> CallDecision:
        """Start the workers, if the fences allow it; the start is under way when this returns."""
        decision = decide_start(self._fence_state(), request.generation)
        self._log_unless_acted("start", decision, request.generation)
        if decision.verdict is not CallVerdict.ACT:
            return decision
        self.log.group_rank = request.rank
        if request.is_spare:
            self._coordinator.publish_rank_info(request)
            self._reporter.job_facts(request, generation=request.run_generation)
            self.log.info("held as a spare", generation=request.run_generation)
            return decision
        self._last_outcome = None
        if self._store is not None:
            num_ranks = request.nnodes * self._settings.layout.nproc
            self._store.begin(request.run_generation, num_ranks, is_server=request.rank == 0 and bool(request.store))
        self._supervisor = self._new_supervisor(request)
        self._reporter.started(request, self._settings.layout.nproc)
        self._task = asyncio.ensure_future(self._run_generation(self._supervisor))
        return decision

    def prepare(self, request: PrepareRequest) -> CallDecision:
        """Start the workers ahead of the next generation, up to the barrier; they are under way when this returns."""
        has_workers = self._pool is not None or not self._kept.is_empty
        decision = decide_prepare(self._fence_state(), request.generation, has_workers=has_workers)
        self._log_unless_acted("prepare", decision, request.generation)
        if decision.verdict is CallVerdict.ACT:
            before = before_generation(request.nnodes, request.generation or 0)
            self._begin_before_start(before, followed_store=request.store)
        return decision

    def _begin_before_start(self, before: StartRequest, followed_store: str = "") -> None:
        """Start the workers of the next generation. before: the start that they begin with, without a rank."""
        self._coordinator.followed_store = followed_store
        self._kept.prepare(before)

    def _new_supervisor(self, request: StartRequest) -> GenerationSupervisor:
        reporter = self._reporter
        events = RunEvents(
            on_fault=self._on_fault,
            on_deeper=reporter.deeper_restart,
            on_saving=reporter.saving,
            on_unanswered=reporter.unanswered,
        )
        run = GenerationRun(self._runtime, request, events)
        if self._pool is None:
            keepable = KeepableWorkers(self._runtime, run, kept=self._kept, coordinator=self._coordinator)
            keepable.begin()
            return GenerationSupervisor(run, keepable)
        workers = PooledWorkers(self._settings, run, pool=self._pool, coordinator=self._coordinator)
        return GenerationSupervisor(run, workers)

    async def _run_generation(self, supervisor: GenerationSupervisor) -> None:
        gap = asyncio.ensure_future(measure_gap(supervisor.progress, self._last_report, self._reporter.first_step))
        end = await self._guarded(supervisor.run())
        gap.cancel()
        if (last := supervisor.progress()) is not None:
            self._last_report = last
        if end is None:
            return
        await self._runtime.pump.caught_up()  # the output of the run is shown before its end is reported
        if self._pool is None:
            self._coordinator.end_run(is_faulty=False)
        self._last_outcome = end.outcome
        status = self.status
        if status.current.state is not S.SHUTDOWN:
            self._reporter.ended(end)
        if self._begins_next(end):
            return
        if end.successors is not None and status.current.state is S.READY and not status.current.terminating:
            self._begin_before_start(end.successors)
        if self.status.current.terminating:
            limit_s = FINAL_STATUS_S if self._kept.pool is None else GIVING_LIMIT_S
            asyncio.get_running_loop().call_later(limit_s, self._begin_shutdown)

    def _begins_next(self, end: GenerationEnd) -> bool:
        """Begin the generation that the /stop of this drain has named, if all workers are back with what they hold.

        They have left together with those of all other pods, as they say: who comes back after a fault may lack what others were to
        hand over, and the operator decides. It also hands out what workers leave for each other, with the /start.
        """
        start, self._next_start = self._next_start, None
        self._reporter.next_generation(None)
        status, pool = self.status.current, self._kept.pool if self._pool is None else self._pool
        is_whole = (
            end.outcome is Outcome.DRAINED
            and pool is not None
            and pool.kept_all_processes
            and self._coordinator.have_left
        )
        if start is None or not is_whole or status.worker_data or status.state is not S.READY or status.terminating:
            return False
        return self.start(start).verdict is CallVerdict.ACT

    def _note_next(self, request: StopRequest) -> None:
        """Note what follows the drain under way, as the newest /stop says. The end of anything but a drain has nothing to follow it."""
        is_draining = self.status.current.state is S.STOPPING and request.is_graceful
        self._next_start = request.next_start if is_draining else None
        self._reporter.next_generation(None if self._next_start is None else self._next_start.run_generation)

    def _kept_workers_changed(self, pool: WorkerPool | None) -> None:
        self._reporter.kept_workers(pool)
        if pool is not None:
            pool.on_renewal = self._reporter.workers_renewed

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Do a part of the agent's own work; gives None if it failed by an error of the agent."""
        try:
            return await work
        except Exception as error:  # leave, so that the pod is replaced instead of hanging
            self._has_failed = True
            self.log.error("the agent itself failed and leaves", why=repr(error))
            write_termination_message("".join(traceback.format_exception(error)))
            self._begin_shutdown()
            return None

    def _on_reported_fault(self, fault: Fault) -> None:
        """A worker reports that its run cannot continue."""
        if self._supervisor is not None:
            self._supervisor.report_fault(fault)

    def _on_fault(self, fault: Fault) -> None:
        """The generation has a fault; the rest of it is torn down next."""
        self._reporter.fault(fault)
        is_pooled = self._pool is not None or self._kept.pool is not None
        if self.status.current.terminating and is_pooled:  # pooled workers would wait for a /stop
            asyncio.get_running_loop().call_later(FINAL_STATUS_S, self._begin_shutdown)

    def stop(self, request: StopRequest) -> CallDecision:
        """Drain or end the workers; the agent becomes READY by itself."""
        decision = decide_stop(self._fence_state(), request.generation, is_graceful=request.is_graceful)
        if decision.verdict is not CallVerdict.REFUSE and request.generation is not None:
            self._newest_stopped = max(self._newest_stopped, request.generation)
        if decision.verdict is not CallVerdict.REFUSE and not request.is_graceful:
            self._end_store()  # a drain needs it: its ranks agree on a step there
        self._log_unless_acted("stop", decision, request.generation)
        if decision.verdict is CallVerdict.NOTHING and request.is_graceful and request.timeout_s is not None:
            self._change_drain(request.timeout_s, leaves=bool(request.leaves))
        if decision.verdict is not CallVerdict.REFUSE:
            self._end_kept_workers(request)
        if decision.verdict is CallVerdict.NOTHING:
            self._note_next(request)
        if decision.verdict is not CallVerdict.ACT:
            return decision
        is_graceful = request.is_graceful and self.status.current.state is S.RUNNING
        timeout_s = self._settings.shutdown_timeout_s if request.timeout_s is None else request.timeout_s
        mode = parse_restart_mode(request.restart_mode) if self._pool is not None else self._usual_mode
        self._reporter.stopping(mode, is_graceful=is_graceful, timeout_s=timeout_s)
        self._note_next(request)
        if self._supervisor is not None and self._task is not None and not self._task.done():
            stop_mode = StopMode.GRACEFUL if is_graceful else StopMode.HARD
            self._supervisor.stop(stop_mode, timeout_s, request.restart_mode, leaves=request.leaves)
        else:
            if self._pool is not None:
                self._pool.recall(frozenset(), is_faulty=False)
            self._reporter.stopped()
        return decision

    def _end_store(self) -> None:
        """Free workers that wait for others at the store that this agent serves."""
        if self._store is not None:
            self._store.end()

    def _end_kept_workers(self, request: StopRequest) -> None:
        """End workers that wait for the next start, or for others of their pod, as a /stop asks that goes deeper than the last one."""
        is_ready = self.status.current.state is S.READY
        if not is_ready and (request.is_graceful or self.status.current.state is not S.STOPPING):
            return
        if self._pool is None:
            if not keeps_processes(request.restart_mode, is_graceful=request.is_graceful):
                self._kept.close()
            return
        mode = parse_restart_mode(request.restart_mode)
        everyone = ranks_to_replace(mode, self._settings.layout.nproc, frozenset())
        if everyone and is_ready and self._pool.num_kept:
            self._pool.recall(everyone, is_faulty=False)
        elif everyone and not is_ready and self._supervisor is not None:
            self._supervisor.stop(StopMode.HARD, 0, request.restart_mode)

    def _change_drain(self, timeout_s: float, *, leaves: bool) -> None:
        """Give a drain that is under way less time, as a repeated /stop asks; it never gets more. leaves: the pod ends afterwards."""
        supervisor = self._supervisor
        if supervisor is None or not supervisor.is_draining:
            return
        if leaves:
            supervisor.leave_after_drain()
        if supervisor.shorten_drain(timeout_s):
            self._reporter.drain_shortened(timeout_s)

    def update(self, request: UpdateRequest) -> CallDecision:
        """Record facts about the job; running workers are left alone."""
        decision = decide_update(self._fence_state(), request.generation)
        self._log_unless_acted("update", decision, request.generation)
        if decision.verdict is CallVerdict.ACT:
            self._coordinator.publish_rank_info(request)
            self._reporter.job_facts(request)
        return decision

    # -- the end of the agent --------------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """End what runs, then the process."""
        if self.status.current.state is not S.SHUTDOWN:
            self.log.info("shutting down")
            self._begin_shutdown()

    def _on_sigterm(self) -> None:
        """SIGTERM: the pod is being terminated. Report it, and keep training so that the operator can drain the whole job."""
        if self.status.current.terminating:
            self._on_interrupt(signal.SIGTERM)
            return
        self._exit_signal = signal.SIGTERM
        self.status.set(terminating=True)
        if self._supervisor is not None:
            self._supervisor.note_last()
        is_busy = self._task is not None and not self._task.done()
        self.log.info("SIGTERM: " + ("the workers continue until they are drained" if is_busy else "leaving"))
        if not is_busy or self.status.current.state is S.FAULTED:
            self._begin_shutdown()

    def _on_interrupt(self, number: int) -> None:
        """A signal that asks for a quick end."""
        self._exit_signal = number
        self.log.info(f"{signal_name(number)}: leaving now")
        self._begin_shutdown()

    def _begin_shutdown(self) -> None:
        if self.status.current.state is not S.SHUTDOWN:
            self.status.enter(S.SHUTDOWN)
        if self._pool is not None:
            self._pool.close()
        self._kept.close()
        self._end_store()
        if self._supervisor is not None:
            self._supervisor.stop(StopMode.HARD, 0)
        self._shutdown_requested.set()

    # -- fences ----------------------------------------------------------------------------------------------------

    def _fence_state(self) -> FenceState:
        status = self.status.current
        return FenceState(
            state=status.state,
            generation=status.generation,
            newest_stopped=self._newest_stopped,
            draining=self._supervisor is not None and self._supervisor.is_draining,
            terminating=status.terminating,
        )

    def _log_unless_acted(self, call: str, decision: CallDecision, generation: int | None) -> None:
        if decision.verdict is not CallVerdict.ACT:
            done = "refused" if decision.verdict is CallVerdict.REFUSE else "changes nothing"
            self.log.info(f"/{call} {done}", why=decision.why, asked=generation)
