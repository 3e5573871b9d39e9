"""The agent of one pod: takes the operator's calls, runs generations, answers for the state, and leaves in order."""

from __future__ import annotations

import asyncio
import signal
import traceback
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

from elastipod.ipc_wire import SOCKET_ENV, RestartMode
from elastipod_agent import __version__
from elastipod_agent.clock import utc_now
from elastipod_agent.core.exits import Outcome, Stop, agent_exit_code, signal_name
from elastipod_agent.core.fences import Answer, Situation, Verdict, decide_start, decide_stop, decide_update
from elastipod_agent.core.inprocess_restart import spoken_mode
from elastipod_agent.core.requests import Start, StopRequest, Update
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.fork_server.fork_server_manager import WarmWorkers
from elastipod_agent.generation import End, Fault, Generation
from elastipod_agent.inprocess.inprocess_run import InProcessRun
from elastipod_agent.inprocess.worker_pool import Keeper
from elastipod_agent.ipc.link import SOCKET_NAME, WorkerLink
from elastipod_agent.log import EventLog
from elastipod_agent.settings import Settings
from elastipod_agent.status import Board
from elastipod_agent.workers.failure import write_termination_message
from elastipod_agent.workers.output_pump import OutputPump
from elastipod_agent.workers.reaper import Reaper

# How long the end of a run stays readable once the pod is being terminated; an operator's /shutdown makes it shorter.
FAREWELL_S = 5.0

T = TypeVar("T")

UNANSWERED = "no worker asks elastic_event_detected() or handles SIGUSR1"


class Agent:
    """Everything between the control API and the processes. All methods belong to the event loop's thread.

    root: a private folder for the files of generations, each removed with its generation.
    """

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], root: Path, pump: OutputPump, log: EventLog
    ) -> None:
        self.board = Board(utc_now)
        self.log = log
        self._settings = settings
        self._environ = {**environ, SOCKET_ENV: str(root / SOCKET_NAME)}
        self._pump = pump
        self._reaper = Reaper()
        self._root = root
        self._warm = WarmWorkers(settings, self._environ, self._reaper, pump, log)
        self._link = WorkerLink(settings.layout, root, self.board, self._sent)
        self._exchange = self._link.exchange
        self._keeper: Keeper | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._generation: Generation | None = None
        self._task: asyncio.Task[None] | None = None
        self._barred = 0
        self._last: Outcome | None = None
        self._leave = asyncio.Event()
        self._by_signal: int | None = None
        self._is_broken = False
        usual = RestartMode.IN_PROCESS_RESTART if settings.is_inprocess else RestartMode.PROCESS_LEVEL_RESTART
        self._usual_mode = usual
        self.board.set(restart_mode=self._usual_mode.value)

    # -- the control API -----------------------------------------------------------------------------------------

    def start(self, request: Start) -> Answer:
        """Run the workers as ordered, if the fences let it; they are being started when this returns."""
        answer = decide_start(self._situation(), request.generation)
        self._log_unless_acted("start", answer, request.generation)
        if answer.verdict is not Verdict.ACT:
            return answer
        self.log.group_rank = request.rank
        facts = _facts(request)
        if request.is_spare:
            self._exchange.tell_ranks(request)
            self.board.set(**facts, generation=request.run_generation)
            self.log.info("held as a spare", generation=request.run_generation)
            return answer
        self._last = None
        if self._keeper is None:
            self._exchange.begin_run(request, progress=request.progress, is_fresh=True)
        self.board.enter(
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
        self._generation = self._new_generation(request)
        self._task = asyncio.ensure_future(self._run(self._generation))
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

    def stop(self, request: StopRequest) -> Answer:
        """Drain or end the workers; the agent becomes READY by itself."""
        answer = decide_stop(self._situation(), request.generation, is_graceful=request.is_graceful)
        if answer.verdict is not Verdict.REFUSE and request.generation is not None:
            self._barred = max(self._barred, request.generation)
        self._log_unless_acted("stop", answer, request.generation)
        if answer.verdict is Verdict.NOTHING and request.is_graceful and request.timeout_s is not None:
            self._shorten_drain(request.timeout_s)
        if answer.verdict is not Verdict.ACT:
            return answer
        is_graceful = request.is_graceful and self.board.status.state is S.RUNNING
        timeout_s = self._settings.shutdown_timeout_s if request.timeout_s is None else request.timeout_s
        self.log.info(
            "draining workers" if is_graceful else "stopping workers",
            generation=self.board.status.generation,
            timeout_s=timeout_s if is_graceful else None,
        )
        if self.board.status.state is not S.STOPPING:
            mode = spoken_mode(request.restart_mode) if self._keeper is not None else self._usual_mode
            self.board.enter(S.STOPPING, restart_mode=mode.value, reason=None, message=None)
        if self._generation is not None and self._task is not None and not self._task.done():
            how = Stop.GRACEFUL if is_graceful else Stop.HARD
            self._generation.stop(how, timeout_s, request.restart_mode, leaves=request.leaves)
        else:
            if self._keeper is not None:
                self._keeper.call_back(frozenset(), is_faulty=False)
            self.board.enter(S.READY, drained=False)
        return answer

    def _shorten_drain(self, timeout_s: float) -> None:
        """Give a drain that is under way less time, as a repeated /stop says; it never gets more."""
        if self._generation is not None and self._generation.is_draining and self._generation.shorten(timeout_s):
            self.log.info("the drain has less time", generation=self.board.status.generation, timeout_s=timeout_s)

    def update(self, request: Update) -> Answer:
        """Take note of facts about the job; running workers are left alone."""
        answer = decide_update(self._situation(), request.generation)
        self._log_unless_acted("update", answer, request.generation)
        if answer.verdict is Verdict.ACT:
            self._exchange.tell_ranks(request)
            self.board.set(**_facts(request))
        return answer

    def shut_down(self) -> None:
        """Leave: end what runs, then the process."""
        if self.board.status.state is not S.SHUTDOWN:
            self.log.info("shutting down")
            self._go()

    def status_json(self) -> dict[str, Any]:
        """Give /status's body."""
        return self.board.as_json(None if self._generation is None else self._generation.progress())

    # -- life ----------------------------------------------------------------------------------------------------

    async def begin(self, port: int) -> None:
        """Take over children and signals, and become READY; the server listens already, on this port."""
        loop = asyncio.get_running_loop()
        self._reaper.start()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # workers inherit it: the event must not kill who never asks
        loop.add_signal_handler(signal.SIGTERM, self._terminated)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            loop.add_signal_handler(number, self._interrupted, number)
        if self._settings.is_warm:
            self._reaper.nursery = self._warm
            is_warming = self._warm.begin(lambda: self.board.set(warming=False))
            self.board.set(warming=is_warming)
        await self._link.listen()
        if self.board.status.state is not S.INIT:
            return  # it was told to leave meanwhile
        if self._settings.is_inprocess:
            parts = (self._root, self._environ, self._reaper, self._pump)
            self._keeper = Keeper(self._settings, *parts, self._exchange, self.log)
            self._keeper.on_change = self._gathered
            self._keeping = asyncio.ensure_future(self._guarded(self._keeper.run()))
        else:
            self.board.enter(S.READY)
        event = "ready" if self._keeper is None else "listening; workers are on their way to the barrier"
        self.log.info(event, version=__version__, port=port, nproc=self._settings.layout.nproc)

    async def live(self) -> int:
        """Stay until /shutdown or a signal says to leave, end what runs, and give the process's exit code."""
        await self._leave.wait()
        is_faulted = self._is_broken or self.board.status.failure is not None
        left = [task for task in (self._task, self._keeping) if task is not None and not task.done()]
        if left:
            await asyncio.wait(left, timeout=self._settings.server_shutdown_timeout_s)
        await self._link.close()
        await self._warm.end()
        self._reaper.stop()
        code = agent_exit_code(self._last, is_faulted=is_faulted, by_signal=self._by_signal)
        self.log.info("gone", exit_code=code)
        return code

    def _new_generation(self, request: Start) -> Generation:
        parts: dict[str, Any] = {"root": self._root, "environ": self._environ, "reaper": self._reaper}
        parts |= {"pump": self._pump, "on_fault": self._faulted, "on_saving": self._saving}
        parts["on_unanswered"] = self._unanswered
        if self._keeper is None:
            return Generation(self._settings, request, **parts)
        return InProcessRun(self._settings, request, **parts, keeper=self._keeper, exchange=self._exchange)

    async def _guarded(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Do a part of our own work; gives None when it failed by a mistake of ours."""
        try:
            return await work
        except Exception as error:  # leave, so that the pod is replaced instead of hanging
            self._is_broken = True
            self.log.error("the agent itself failed and leaves", why=repr(error))
            write_termination_message("".join(traceback.format_exception(error)))
            self._go()
            return None

    async def _run(self, generation: Generation) -> None:
        end = await self._guarded(generation.run())
        if end is None:
            return
        await self._pump.caught_up()  # what the run printed is shown before its end is told
        if self._keeper is None:
            self._exchange.end_run(is_faulty=False)
        self._last = end.outcome
        if self.board.status.state is not S.SHUTDOWN:
            self._enter_end(end)
        if self.board.status.terminating:
            asyncio.get_running_loop().call_later(FAREWELL_S, self._go)

    def _enter_end(self, end: End) -> None:
        """Move to the state that the end of a generation means."""
        is_stopping = self.board.status.state is S.STOPPING
        generation = self.board.status.generation
        if end.stuck:
            self._stuck(end.stuck)
        elif end.outcome is Outcome.DRAINED:
            path = (S.READY,) if is_stopping else (S.STOPPING, S.READY)
            self.board.enter(*path, reason="Drained", message=None, drained=True, **self._kept())
            self.log.info("drained", generation=generation)
        elif is_stopping:
            if end.is_late and self.board.status.reason is None:
                self.board.set(reason="DrainTimedOut", message=end.note)
            elif self.board.status.unanswered and self.board.status.reason is None:
                self.board.set(reason="EventUnanswered", message=f"{UNANSWERED}; they were ended without a checkpoint")
            self.board.enter(S.READY, drained=False, **self._kept())
            self.log.info("stopped", generation=generation, reason=self.board.status.reason)
        elif end.outcome is Outcome.COMPLETED:
            self.board.enter(S.COMPLETED, message=end.note or None)
            write_termination_message(end.note)
            self.log.info("completed", generation=generation, note=end.note or None)

    def _gathered(self) -> None:
        """The first workers are at the barrier, or will not come there: the next start then says why."""
        if self._keeper is not None and self._keeper.is_gathered and self.board.status.state is S.INIT:
            self.board.enter(S.READY, **self._kept())
            self.log.info("ready")

    def _kept(self) -> dict[str, Any]:
        """Give what a ready agent says about workers that live on: whether all do, and why some will not come."""
        if self._keeper is None:
            return {}
        # What a stop asked for is done: the next /start is for an agent that restarts as it always does.
        known = {"has_priority": self._keeper.has_kept, "restart_mode": self._usual_mode.value, **self._link.reported()}
        fault = self._keeper.fault
        if fault is None:
            return known
        write_termination_message(fault.failure.message)
        return known | {"reason": fault.reason, "message": fault.failure.message, "failure": fault.failure}

    def _stuck(self, stuck: tuple[int, ...]) -> None:
        """Processes that outlive SIGKILL hold their devices: this pod is no place for another generation."""
        pids = ", ".join(map(str, stuck))
        self.log.error("processes cannot be killed", pids=pids)
        if self.board.status.state is not S.FAULTED:
            message = f"processes {pids} cannot be killed; the node may need attention"
            self.board.enter(S.FAULTED, reason="WorkerUnhealthy", message=message)

    def _faulted(self, fault: Fault) -> None:
        """A worker failed: say so at once. During a stop the state stays STOPPING, and READY comes without `drained`."""
        failure = fault.failure
        if self.board.status.state is S.RUNNING:
            mode = fault.restart_mode or self._usual_mode
            said = {"reason": fault.reason, "message": failure.message, "failure": failure, "restart_mode": mode.value}
            self.board.enter(S.FAULTED, **said, **self._link.reported())
        elif self.board.status.state is S.STOPPING:
            self.board.set(reason=fault.reason, message=failure.message, failure=failure)
        self.log.error(
            "fault",
            generation=self.board.status.generation,
            reason=fault.reason,
            global_rank=failure.global_rank,
            exitcode=failure.exitcode,
            signal=failure.signal,
            message=failure.message.partition("\n")[0],
        )
        write_termination_message(failure.message)
        if self.board.status.terminating and self._keeper is not None:  # a standing run would wait for a stop to end it
            asyncio.get_running_loop().call_later(FAREWELL_S, self._go)

    def _saving(self) -> None:
        """All workers know that they are to end, and are on their way."""
        if self.board.status.state is S.STOPPING:
            self.board.set(saving=True)

    def _unanswered(self) -> None:
        """No worker here can know of the drain. The operator ends it where that is so in every pod: one rank may ask for all."""
        if self.board.status.state is S.STOPPING:
            self.board.set(unanswered=True)
            self.log.info(UNANSWERED, generation=self.board.status.generation)

    def _sent(self, fault: Fault) -> None:
        """A worker says itself that its run cannot go on."""
        if self._generation is not None:
            self._generation.take_fault(fault)

    def _terminated(self) -> None:
        """SIGTERM: the pod is going away. Say so, and keep training so that the operator can drain the whole job."""
        if self.board.status.terminating:
            self._interrupted(signal.SIGTERM)
            return
        self._by_signal = signal.SIGTERM
        self.board.set(terminating=True)
        is_busy = self._task is not None and not self._task.done()
        self.log.info("SIGTERM: " + ("the workers go on until they are drained" if is_busy else "leaving"))
        if not is_busy or self.board.status.state is S.FAULTED:
            self._go()

    def _interrupted(self, number: int) -> None:
        """A signal that asks for a quick end."""
        self._by_signal = number
        self.log.info(f"{signal_name(number)}: leaving now")
        self._go()

    def _go(self) -> None:
        if self.board.status.state is not S.SHUTDOWN:
            self.board.enter(S.SHUTDOWN)
        if self._keeper is not None:
            self._keeper.close()
        if self._generation is not None:
            self._generation.stop(Stop.HARD, 0)
        self._leave.set()

    def _situation(self) -> Situation:
        status = self.board.status
        return Situation(
            state=status.state,
            generation=status.generation,
            barred=self._barred,
            draining=self._generation is not None and self._generation.is_draining,
            terminating=status.terminating,
        )

    def _log_unless_acted(self, call: str, answer: Answer, generation: int | None) -> None:
        if answer.verdict is not Verdict.ACT:
            done = "refused" if answer.verdict is Verdict.REFUSE else "changes nothing"
            self.log.info(f"/{call} {done}", why=answer.why, asked=generation)


def _facts(request: Update) -> dict[str, Any]:
    return {
        "assigned_rank": request.rank,
        "is_spare": request.is_spare,
        "ip_version": request.ip_version,
    }
