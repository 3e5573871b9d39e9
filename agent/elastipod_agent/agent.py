"""The agent of one pod: takes the operator's calls, runs generations, answers for the state, and leaves in order."""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from elastipod.ipc.protocol import SOCKET_ENV, RestartMode
from elastipod_agent import __version__
from elastipod_agent.clock import utc_now
from elastipod_agent.core.exits import Outcome, StopMode, agent_exit_code, signal_name
from elastipod_agent.core.fences import CallDecision, CallVerdict, FenceState, decide_start, decide_stop, decide_update
from elastipod_agent.core.inprocess_restart import parse_restart_mode
from elastipod_agent.core.requests import StartRequest, StopRequest, UpdateRequest
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.fork_server.fork_server_manager import ForkServerManager
from elastipod_agent.generation import Fault, GenerationEnd, GenerationSupervisor
from elastipod_agent.inprocess.inprocess_run import InProcessRun
from elastipod_agent.inprocess.worker_pool import WorkerPool
from elastipod_agent.ipc.link import SOCKET_NAME, WorkerLink
from elastipod_agent.log import EventLog
from elastipod_agent.settings import Settings
from elastipod_agent.status import StatusStore
from elastipod_agent.workers.failure import write_termination_message
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper

# How long the end of a run stays readable once the pod is being terminated; an operator's /shutdown makes it shorter.
FINAL_STATUS_S = 5.0

T = TypeVar("T")

UNANSWERED = "no worker asks elastic_event_detected() or handles SIGUSR1"


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
        self._environ = {**environ, SOCKET_ENV: str(root / SOCKET_NAME)}
        self._pump = pump
        self._reaper = Reaper()
        self._root = root
        self._warm = ForkServerManager(settings, self._environ, self._reaper, pump, log)
        self._link = WorkerLink(settings.layout, root, self.status, self._on_reported_fault)
        self._coordinator = self._link.coordinator
        self._pool: WorkerPool | None = None
        self._pool_task: asyncio.Task[None] | None = None
        self._supervisor: GenerationSupervisor | None = None
        self._task: asyncio.Task[None] | None = None
        self._newest_stopped = 0
        self._last_outcome: Outcome | None = None
        self._shutdown_requested = asyncio.Event()
        self._exit_signal: int | None = None
        self._has_failed = False
        usual = RestartMode.IN_PROCESS_RESTART if settings.is_inprocess else RestartMode.PROCESS_LEVEL_RESTART
        self._usual_mode = usual
        self.status.set(restart_mode=self._usual_mode.value)

    # -- the control API -----------------------------------------------------------------------------------------

    def start(self, request: StartRequest) -> CallDecision:
        """Run the workers as ordered, if the fences let it; they are being started when this returns."""
        answer = decide_start(self._fence_state(), request.generation)
        self._log_unless_acted("start", answer, request.generation)
        if answer.verdict is not CallVerdict.ACT:
            return answer
        self.log.group_rank = request.rank
        facts = _facts(request)
        if request.is_spare:
            self._coordinator.publish_rank_info(request)
            self.status.set(**facts, generation=request.run_generation)
            self.log.info("held as a spare", generation=request.run_generation)
            return answer
        self._last_outcome = None
        if self._pool is None:
            self._coordinator.begin_run(request, progress=request.progress, is_fresh=True)
        self.status.enter(
            S.RUNNING,
            **facts,
            **self._link.reported(),
            generation=request.run_generation,
            reason=None,
            message=None,
            restart_mode=self._usual_mode.value,
            drained=False,
            has_priority=False,
            failure=None,
        )
        write_termination_message("")
        self._supervisor = self._new_supervisor(request)
        self._task = asyncio.ensure_future(self._run(self._supervisor))
        self.log.info(
            "starting workers",
            generation=request.run_generation,
            nnodes=request.nnodes,
            nproc=self._settings.layout.nproc,
            world_size=request.nnodes * self._settings.layout.nproc,
            master=f"{request.master_addr}:{request.master_port}",
            restarts=request.fault_count,
        )
        return answer

    def stop(self, request: StopRequest) -> CallDecision:
        """Drain or end the workers; the agent becomes READY by itself."""
        answer = decide_stop(self._fence_state(), request.generation, is_graceful=request.is_graceful)
        if answer.verdict is not CallVerdict.REFUSE and request.generation is not None:
            self._newest_stopped = max(self._newest_stopped, request.generation)
        self._log_unless_acted("stop", answer, request.generation)
        if answer.verdict is CallVerdict.NOTHING and request.is_graceful and request.timeout_s is not None:
            self._shorten_drain(request.timeout_s)
        if answer.verdict is not CallVerdict.ACT:
            return answer
        is_graceful = request.is_graceful and self.status.current.state is S.RUNNING
        timeout_s = self._settings.shutdown_timeout_s if request.timeout_s is None else request.timeout_s
        self.log.info(
            "draining workers" if is_graceful else "stopping workers",
            generation=self.status.current.generation,
            timeout_s=timeout_s if is_graceful else None,
        )
        if self.status.current.state is not S.STOPPING:
            mode = parse_restart_mode(request.restart_mode) if self._pool is not None else self._usual_mode
            self.status.enter(S.STOPPING, restart_mode=mode.value, reason=None, message=None)
        if self._supervisor is not None and self._task is not None and not self._task.done():
            how = StopMode.GRACEFUL if is_graceful else StopMode.HARD
            self._supervisor.stop(how, timeout_s, request.restart_mode, leaves=request.leaves)
        else:
            if self._pool is not None:
                self._pool.recall(frozenset(), is_faulty=False)
            self.status.enter(S.READY, drained=False)
        return answer

    def _shorten_drain(self, timeout_s: float) -> None:
        """Give a drain that is under way less time, as a repeated /stop says; it never gets more."""
        if self._supervisor is not None and self._supervisor.is_draining and self._supervisor.shorten(timeout_s):
            self.log.info("the drain has less time", generation=self.status.current.generation, timeout_s=timeout_s)

    def update(self, request: UpdateRequest) -> CallDecision:
        """Take note of facts about the job; running workers are left alone."""
        answer = decide_update(self._fence_state(), request.generation)
        self._log_unless_acted("update", answer, request.generation)
        if answer.verdict is CallVerdict.ACT:
            self._coordinator.publish_rank_info(request)
            self.status.set(**_facts(request))
        return answer

    def shut_down(self) -> None:
        """Leave: end what runs, then the process."""
        if self.status.current.state is not S.SHUTDOWN:
            self.log.info("shutting down")
            self._begin_shutdown()

    def status_json(self) -> dict[str, Any]:
        """Give /status's body."""
        return self.status.as_json(None if self._supervisor is None else self._supervisor.progress())

    # -- life ----------------------------------------------------------------------------------------------------

    async def start_up(self, port: int) -> None:
        """Take over children and signals, and become READY; the server listens already, on this port."""
        loop = asyncio.get_running_loop()
        self._reaper.start()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # workers inherit it: the event must not kill who never asks
        loop.add_signal_handler(signal.SIGTERM, self._on_sigterm)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, self._on_interrupt, number)
        if self._settings.is_warm:
            self._reaper.forker = self._warm
            is_warming = self._warm.begin(lambda: self.status.set(warming=False))
            self.status.set(warming=is_warming)
        await self._link.listen()
        if self.status.current.state is not S.INIT:
            return  # it was told to leave meanwhile
        if self._settings.is_inprocess:
            parts = (self._root, self._environ, self._reaper, self._pump)
            self._pool = WorkerPool(self._settings, *parts, self._coordinator, self.log)
            self._pool.on_change = self._on_workers_gathered
            self._pool_task = asyncio.ensure_future(self._guarded(self._pool.run()))
        else:
            self.status.enter(S.READY)
        event = "ready" if self._pool is None else "listening; workers are on their way to the barrier"
        self.log.info(event, version=__version__, port=port, nproc=self._settings.layout.nproc)

    async def run_until_shutdown(self) -> int:
        """Stay until /shutdown or a signal says to leave, end what runs, and give the process's exit code."""
        await self._shutdown_requested.wait()
        is_faulted = self._has_failed or self.status.current.failure is not None
        left = [task for task in (self._task, self._pool_task) if task is not None and not task.done()]
        if left:
            await asyncio.wait(left, timeout=self._settings.server_shutdown_timeout_s)
        await self._link.close()
        await self._warm.end()
        self._reaper.stop()
        code = agent_exit_code(self._last_outcome, is_faulted=is_faulted, exit_signal=self._exit_signal)
        self.log.info("gone", exit_code=code)
        return code

    def _new_supervisor(self, request: StartRequest) -> GenerationSupervisor:
        parts: dict[str, Any] = {"root": self._root, "environ": self._environ, "reaper": self._reaper}
        parts |= {"pump": self._pump, "on_fault": self._on_fault, "on_saving": self._on_saving}
        parts["on_unanswered"] = self._on_unanswered
        if self._pool is None:
            return GenerationSupervisor(self._settings, request, **parts)
        return InProcessRun(self._settings, request, **parts, pool=self._pool, coordinator=self._coordinator)

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Do a part of our own work; gives None when it failed by a mistake of ours."""
        try:
            return await work
        except Exception as error:  # leave, so that the pod is replaced instead of hanging
            self._has_failed = True
            self.log.error("the agent itself failed and leaves", why=repr(error))
            write_termination_message("".join(traceback.format_exception(error)))
            self._begin_shutdown()
            return None

    async def _run(self, generation: GenerationSupervisor) -> None:
        end = await self._guarded(generation.run())
        if end is None:
            return
        await self._pump.caught_up()  # what the run printed is shown before its end is told
        if self._pool is None:
            self._coordinator.end_run(is_faulty=False)
        self._last_outcome = end.outcome
        if self.status.current.state is not S.SHUTDOWN:
            self._enter_end(end)
        if self.status.current.terminating:
            asyncio.get_running_loop().call_later(FINAL_STATUS_S, self._begin_shutdown)

    def _enter_end(self, end: GenerationEnd) -> None:
        """Move to the state that the end of a generation means."""
        is_stopping = self.status.current.state is S.STOPPING
        generation = self.status.current.generation
        if end.stuck:
            self._stuck(end.stuck)
        elif end.outcome is Outcome.DRAINED:
            path = (S.READY,) if is_stopping else (S.STOPPING, S.READY)
            self.status.enter(*path, reason="Drained", message=None, drained=True, **self._kept_worker_fields())
            self.log.info("drained", generation=generation)
        elif is_stopping:
            if end.is_late and self.status.current.reason is None:
                self.status.set(reason="DrainTimedOut", message=end.note)
            elif self.status.current.unanswered and self.status.current.reason is None:
                self.status.set(reason="EventUnanswered", message=f"{UNANSWERED}; they were ended without a checkpoint")
            self.status.enter(S.READY, drained=False, **self._kept_worker_fields())
            self.log.info("stopped", generation=generation, reason=self.status.current.reason)
        elif end.outcome is Outcome.COMPLETED:
            self.status.enter(S.COMPLETED, message=end.note or None)
            write_termination_message(end.note)
            self.log.info("completed", generation=generation, note=end.note or None)

    def _on_workers_gathered(self) -> None:
        """The first workers are at the barrier, or will not come there: the next start then says why."""
        if self._pool is not None and self._pool.is_gathered and self.status.current.state is S.INIT:
            self.status.enter(S.READY, **self._kept_worker_fields())
            self.log.info("ready")

    def _kept_worker_fields(self) -> dict[str, Any]:
        """Give what a ready agent says about workers that live on: whether all do, and why some will not come."""
        if self._pool is None:
            return {}
        # What a stop asked for is done: the next /start is for an agent that restarts as it always does.
        known = {
            "has_priority": self._pool.kept_all_processes,
            "restart_mode": self._usual_mode.value,
            **self._link.reported(),
        }
        fault = self._pool.fault
        if fault is None:
            return known
        write_termination_message(fault.failure.message)
        return known | {"reason": fault.reason, "message": fault.failure.message, "failure": fault.failure}

    def _stuck(self, stuck: tuple[int, ...]) -> None:
        """Processes that outlive SIGKILL hold their devices: this pod is no place for another generation."""
        pids = ", ".join(map(str, stuck))
        self.log.error("processes cannot be killed", pids=pids)
        if self.status.current.state is not S.FAULTED:
            message = f"processes {pids} cannot be killed; the node may need attention"
            self.status.enter(S.FAULTED, reason="WorkerUnhealthy", message=message)

    def _on_fault(self, fault: Fault) -> None:
        """A worker failed: say so at once. During a stop the state stays STOPPING, and READY comes without `drained`."""
        failure = fault.failure
        if self.status.current.state is S.RUNNING:
            mode = fault.restart_mode or self._usual_mode
            said = {"reason": fault.reason, "message": failure.message, "failure": failure, "restart_mode": mode.value}
            self.status.enter(S.FAULTED, **said, **self._link.reported())
        elif self.status.current.state is S.STOPPING:
            self.status.set(reason=fault.reason, message=failure.message, failure=failure)
        self.log.error(
            "fault",
            generation=self.status.current.generation,
            reason=fault.reason,
            global_rank=failure.global_rank,
            exitcode=failure.exitcode,
            signal=failure.signal,
            message=failure.message.partition("\n")[0],
        )
        write_termination_message(failure.message)
        if self.status.current.terminating and self._pool is not None:  # a standing run would wait for a stop to end it
            asyncio.get_running_loop().call_later(FINAL_STATUS_S, self._begin_shutdown)

    def _on_saving(self) -> None:
        """All workers know that they are to end, and are on their way."""
        if self.status.current.state is S.STOPPING:
            self.status.set(saving=True)

    def _on_unanswered(self) -> None:
        """No worker here can know of the drain. The operator ends it where that is so in every pod: one rank may ask for all."""
        if self.status.current.state is S.STOPPING:
            self.status.set(unanswered=True)
            self.log.info(UNANSWERED, generation=self.status.current.generation)

    def _on_reported_fault(self, fault: Fault) -> None:
        """A worker says itself that its run cannot go on."""
        if self._supervisor is not None:
            self._supervisor.report_fault(fault)

    def _on_sigterm(self) -> None:
        """SIGTERM: the pod is going away. Say so, and keep training so that the operator can drain the whole job."""
        if self.status.current.terminating:
            self._on_interrupt(signal.SIGTERM)
            return
        self._exit_signal = signal.SIGTERM
        self.status.set(terminating=True)
        is_busy = self._task is not None and not self._task.done()
        self.log.info("SIGTERM: " + ("the workers go on until they are drained" if is_busy else "leaving"))
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
        if self._supervisor is not None:
            self._supervisor.stop(StopMode.HARD, 0)
        self._shutdown_requested.set()

    def _fence_state(self) -> FenceState:
        status = self.status.current
        return FenceState(
            state=status.state,
            generation=status.generation,
            newest_stopped=self._newest_stopped,
            draining=self._supervisor is not None and self._supervisor.is_draining,
            terminating=status.terminating,
        )

    def _log_unless_acted(self, call: str, answer: CallDecision, generation: int | None) -> None:
        if answer.verdict is not CallVerdict.ACT:
            done = "refused" if answer.verdict is CallVerdict.REFUSE else "changes nothing"
            self.log.info(f"/{call} {done}", why=answer.why, asked=generation)


def _facts(request: UpdateRequest) -> dict[str, Any]:
    return {
        "assigned_rank": request.rank,
        "is_spare": request.is_spare,
        "ip_version": request.ip_version,
    }
