"""Reports what happens to a generation: in /status, in the agent's log, and in the pod's termination message."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from elastipod.ipc.protocol import RestartMode
from elastipod_agent.core.exits import Outcome
from elastipod_agent.core.inprocess_restart import WorkerPreparation, is_deeper
from elastipod_agent.core.requests import StartRequest, UpdateRequest
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.generation.faults import Fault, GenerationEnd, not_killed
from elastipod_agent.inprocess.worker_pool import WorkerPool
from elastipod_agent.log import EventLog
from elastipod_agent.status import StatusStore
from elastipod_agent.workers import process_table
from elastipod_agent.workers.failure import write_termination_message

UNANSWERED = "no worker asks elastic_event_detected() or handles SIGUSR1"


class StatusReporter:
    """Moves the agent through its states. Belongs to the event loop's thread.

    usual_mode: how this agent restarts when nothing else is asked. reported: gives the fields of the status that workers fill. pool:
    workers that live over generations, if there are any.
    """

    def __init__(
        self, status: StatusStore, log: EventLog, usual_mode: RestartMode, reported: Callable[[], dict[str, Any]]
    ) -> None:
        self.pool: WorkerPool | None = None
        self._status = status
        self._log = log
        self._usual_mode = usual_mode
        self._reported = reported
        self._unkillable: tuple[int, ...] = ()
        status.set(restart_mode=usual_mode.value)

    def ready(self) -> None:
        """The agent has started: READY, or, with a pool, INIT until the workers are gathered."""
        if self.pool is None:
            self._status.enter(S.READY)

    def workers_gathered(self) -> None:
        """The pool has changed. READY once its first workers are at the barrier, or it has given them up; the next start says why."""
        if self.pool is not None and self.pool.is_gathered and self._status.current.state is S.INIT:
            self._status.enter(S.READY, **self._pool_fields())
            self._log.info("ready")

    def workers_renewed(self) -> None:
        """A worker of the last run has ended before the next one: its successor holds nothing of what it held."""
        status = self._status
        if self.pool is not None and status.current.state is S.READY and status.current.num_kept is not None:
            status.set(num_kept=self.pool.num_kept, has_priority=self.pool.kept_all_processes)

    def kept_workers(self, pool: WorkerPool | None) -> None:
        """Workers live on from now on, or, with None, no longer: those that are prepared afterwards have lived through no run."""
        self.pool = pool
        if pool is None and self._status.current.state is S.READY:
            self._status.set(num_kept=None, has_priority=False, **self._reported())

    def preparation(self, now: WorkerPreparation | None) -> None:
        """Workers that were started ahead of their first run have come this far. A run that takes them over says the rest."""
        status = self._status
        if status.current.state is not S.READY or status.current.preparation is now:
            return
        status.set(preparation=now, **self._reported())
        if now is not None:
            self._log.info(f"prepared workers: {now.value}")

    def job_facts(self, request: UpdateRequest, **fields: Any) -> None:
        """The operator has said which place this pod has in the job."""
        self._status.set(**_facts(request), **fields)

    def started(self, request: StartRequest, nproc: int) -> None:
        """A generation starts: RUNNING, and nothing is left of the one before."""
        self._status.enter(
            S.RUNNING,
            **_facts(request),
            **self._reported(),
            generation=request.run_generation,
            reason=None,
            message=None,
            restart_mode=self._usual_mode.value,
            drained=False,
            has_priority=False,
            num_kept=None,
            preparation=None,
            gap_s=None,
            steps_repeated=None,
            failure=None,
        )
        write_termination_message("")
        self._log.info(
            "starting workers",
            generation=request.run_generation,
            nnodes=request.nnodes,
            nproc=nproc,
            world_size=request.nnodes * nproc,
            master=f"{request.master_addr}:{request.master_port}",
            restarts=request.fault_count,
        )

    def first_step(self, gap_s: float, steps_repeated: int) -> None:
        """The workers of this pod have reported their first step in the generation, and made one before it."""
        self._status.set(gap_s=round(gap_s, 6), steps_repeated=steps_repeated)

    def fault(self, fault: Fault) -> None:
        """The generation cannot continue: FAULTED. During a stop the state stays STOPPING, and READY comes without `drained`."""
        failure, status = fault.failure, self._status
        if status.current.state is S.RUNNING:
            pooled = RestartMode.IN_PROCESS_RESTART  # enough for workers that live on, unless one asks for more
            mode = fault.restart_mode or (self._usual_mode if self.pool is None else pooled)
            fields = {"reason": fault.reason, "message": failure.message, "failure": failure}
            status.enter(S.FAULTED, **fields, restart_mode=mode.value, **self._reported())
        elif status.current.state is S.STOPPING:
            status.set(reason=fault.reason, message=failure.message, failure=failure)
        self._log.error(
            "fault",
            generation=status.current.generation,
            reason=fault.reason,
            global_rank=failure.global_rank,
            exitcode=failure.exitcode,
            signal=failure.signal,
            message=failure.message.partition("\n")[0],
        )
        write_termination_message(failure.message)

    def deeper_restart(self, mode: RestartMode) -> None:
        """Another worker of a generation that has failed asks for more: /status shows the most, while the operator has not decided."""
        shown = self._status.current.restart_mode
        if self._status.current.state is S.FAULTED and is_deeper(mode, RestartMode(shown) if shown else None):
            self._status.set(restart_mode=mode.value)
            self._log.info("a worker asks for a deeper restart", restart_mode=mode.value)

    def stopping(self, mode: RestartMode, *, is_graceful: bool, timeout_s: float) -> None:
        """A stop begins, or a hard one replaces a drain: STOPPING."""
        self._log.info(
            "draining workers" if is_graceful else "stopping workers",
            generation=self._status.current.generation,
            timeout_s=timeout_s if is_graceful else None,
        )
        if self._status.current.state is not S.STOPPING:
            self._status.enter(S.STOPPING, restart_mode=mode.value, reason=None, message=None)

    def next_generation(self, generation: int | None) -> None:
        """The generation that begins once the workers have drained; None for none."""
        self._status.set(next_generation=generation)

    def drain_shortened(self, timeout_s: float) -> None:
        """The drain under way has less time."""
        self._log.info("the drain has less time", generation=self._status.current.generation, timeout_s=timeout_s)

    def saving(self) -> None:
        """All workers have acknowledged the drain."""
        if self._status.current.state is S.STOPPING:
            self._status.set(saving=True)

    def unanswered(self) -> None:
        """No worker in this pod can know of the drain. The operator ends it if that is so in every pod: one rank may ask for all."""
        if self._status.current.state is S.STOPPING:
            self._status.set(unanswered=True)
            self._log.info(UNANSWERED, generation=self._status.current.generation)

    def stopped(self) -> None:
        """A stop found no run to end: READY, unless processes of an earlier one still live although they were killed."""
        self._unkillable = process_table.living_below(os.getpid(), self._unkillable)
        if self._unkillable:
            self._stuck(self._unkillable)
        else:
            self._status.enter(S.READY, drained=False)

    def ended(self, end: GenerationEnd) -> None:
        """The generation has ended: enter the state that its end means. After a fault without a stop the state stays FAULTED."""
        status, generation = self._status, self._status.current.generation
        is_stopping = status.current.state is S.STOPPING
        if end.stuck:
            self._stuck(end.stuck)
        elif end.outcome is Outcome.DRAINED:
            path = (S.READY,) if is_stopping else (S.STOPPING, S.READY)
            status.enter(*path, reason="Drained", message=None, drained=True, **self._pool_fields())
            self._log.info("drained", generation=generation)
        elif is_stopping:
            self._set_stop_reason(end)
            status.enter(S.READY, drained=False, **self._pool_fields())
            self._log.info("stopped", generation=generation, reason=status.current.reason)
        elif end.outcome is Outcome.COMPLETED:
            status.enter(S.COMPLETED, message=end.note or None, **self._reported())
            write_termination_message(end.note)
            self._log.info("completed", generation=generation, note=end.note or None)

    def _set_stop_reason(self, end: GenerationEnd) -> None:
        """Say why a drain was none, unless a fault has said it."""
        if self._status.current.reason is not None:
            return
        if end.is_late:
            self._status.set(reason="DrainTimedOut", message=end.note)
        elif self._status.current.unanswered:
            message = f"{UNANSWERED}; they were ended without a checkpoint"
            self._status.set(reason="EventUnanswered", message=message)

    def _stuck(self, stuck: tuple[int, ...]) -> None:
        """Processes that survive SIGKILL hold their devices, so this pod can run no other generation: FAULTED."""
        self._unkillable = stuck
        pids = ", ".join(map(str, stuck))
        self._log.error("processes cannot be killed", pids=pids)
        if self._status.current.state is not S.FAULTED:
            self._status.enter(S.FAULTED, reason="WorkerUnhealthy", message=not_killed(stuck))

    def _pool_fields(self) -> dict[str, Any]:
        """Give what a READY agent says about workers that live on: whether all of them do, and why some cannot be started."""
        if self.pool is None:
            return self._reported()
        fields = {
            "has_priority": self.pool.kept_all_processes,
            "num_kept": self.pool.num_kept,
            "restart_mode": self._usual_mode.value,  # the mode that a stop asked for has been carried out
            **self._reported(),
        }
        fault = self.pool.fault
        if fault is None:
            return fields
        write_termination_message(fault.failure.message)
        return fields | {"reason": fault.reason, "message": fault.failure.message, "failure": fault.failure}


def _facts(request: UpdateRequest) -> dict[str, Any]:
    return {"assigned_rank": request.rank, "is_spare": request.is_spare, "ip_version": request.ip_version}
