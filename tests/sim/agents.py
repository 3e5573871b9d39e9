"""The model of an agent in its pod: the real fences and states of the agent's core, with modelled workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.events import Make, Preparing
from tests.sim.kernel import Kernel
from tests.sim.training import Image, Run, Training

from elastipod_agent.core.exits import Outcome, StopMode, WorkerExit, classify
from elastipod_agent.core.fences import (
    CallDecision,
    CallVerdict,
    FenceState,
    decide_prepare,
    decide_start,
    decide_stop,
)
from elastipod_agent.core.inprocess_restart import WorkerPreparation, keeps_processes
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.core.states import move
from elastipod_operator.agents.status import MAX_PROGRESS_BYTES, MAX_WORKER_DATA_BYTES

if TYPE_CHECKING:
    from tests.sim.objects import SimPod

LEAVES_AFTER_S = 2.0
TELL_AFTER_S = 10.0
ANSWER_S = 5.0


IN_PROCESS = "in_process_restart"


@dataclass(frozen=True, slots=True)
class Crash:
    """How a worker failed. reason: the agent's word for it. asks: the restart mode that the worker asks for."""

    exitcode: int | None
    signal: str | None
    message: str
    reason: str = "WorkerCrash"
    asks: str = ""


class Lie(Enum):
    """What an agent tells instead of the truth."""

    NONSENSE = "nonsense"
    OLDER = "an older generation"
    NEWER = "a newer generation"
    ENORMOUS = "an enormous generation"
    FAULTED = "that workers failed"
    COMPLETED = "that its workers finished"
    STOPPED = "that its workers are stopped"
    DRAINED = "that its workers stand at a checkpoint"
    ENDLESS = "data without end"


class SimAgent:
    """One agent process. `alive` ends with its container."""

    def __init__(self, kernel: Kernel, rng: Random, training: Training, pod: SimPod, make: Make) -> None:
        self._kernel = kernel
        self._rng = rng
        self._training = training
        self.pod = pod
        self.make = make
        self.tells_of_others = True
        """Whether it can be asked if it reaches another agent."""
        self.lie: Lie | None = None
        self.lies_until = self.hangs_until = self.lags_until = self.lag_s = 0.0
        self.preparing: Preparing | None = None
        """What becomes of workers that it prepares; None for an agent that can prepare none."""
        self.preparation: WorkerPreparation | None = None
        self.ready_at = 0.0
        """When workers that it prepared came to the barrier."""
        self.processes_since = 0
        """The generation in which its workers' processes were made; they outlive faults where the make says so."""
        self.held: Image | None = None
        """What its workers' processes hold in memory while they wait at the barrier; None where new ones wait, or none."""
        self.drains_in_memory = False
        """Its workers were told that they keep their processes over the drain."""
        self.leaves: bool | None = None
        """What its workers were told in the present drain: whether their pod goes."""
        self.taken: set[int] = set()
        """Parts that ranks which leave have given to its workers."""
        self.has_given = False
        """Another pod has the part of its workers."""
        self._has_announced = False
        self.alive = True
        self.state = S.INIT
        self.generation = 0
        self.rank = 0
        self.newest_stopped = 0
        self.version = 1
        self.reason: str | None = None
        self.drained = False
        self.terminating = False
        self.is_spare = False
        self.failure: Crash | None = None
        self._stop = StopMode.NONE
        self._working = False
        self._stops = 0
        self._judged_at = 0.0

    # -- calls

    def start(self, body: dict[str, Any]) -> CallDecision:
        """POST /start."""
        answer = decide_start(self._fence_state(), body.get("generation"))
        if answer.verdict is CallVerdict.ACT and body.get("spare"):
            self.generation, self.is_spare = body["faultCount"] + 1, True
            self.version += 1
            self.pod.agent_changed()
        elif answer.verdict is CallVerdict.ACT:
            self._training.checker.started_prepared(self)
            self.preparation = None
            self.generation, self.rank, self.is_spare = body["faultCount"] + 1, body["rank"], False
            self.processes_since = self.processes_since or self.generation
            self._training.checker.told(self, body)
            self.drained, self.failure, self._stop, self._working = False, None, StopMode.NONE, True
            self._has_announced, self.drains_in_memory = self.make.keeps_state, False
            self.leaves, self.taken, self.has_given = None, set(), False
            self._enter(S.RUNNING, reason=None)
            self._training.join(self, self.generation, body["rank"], body["nnodes"], body["master_addr"])
        return answer

    def prepare(self, body: dict[str, Any]) -> CallDecision:
        """POST /prepare."""
        has_workers = self._has_announced or self.preparation in (WorkerPreparation.BEGUN, WorkerPreparation.READY)
        answer = decide_prepare(self._fence_state(), body.get("generation"), has_workers=has_workers)
        if answer.verdict is CallVerdict.ACT and self.preparing is not None:
            self._prepared(WorkerPreparation.BEGUN)
            how = self.preparing
            if how is not Preparing.HANGS:
                first = WorkerPreparation.FAILED if how is Preparing.FAILS else WorkerPreparation.READY
                self._kernel.after(self._rng.uniform(1.0, 6.0), lambda: self._come_to(first))
            if how is Preparing.DIES:
                self._kernel.after(6.0 + self._rng.uniform(0.1, 4.0), lambda: self._come_to(WorkerPreparation.FAILED))
        return answer

    def _come_to(self, how: WorkerPreparation) -> None:
        """Workers that are being prepared get to the barrier, or end. Those of a run are not prepared any more."""
        if self.alive and self.state is S.READY and self.preparation is not None:
            if not self._is_awake():
                self._kernel.after(1.0, lambda: self._come_to(how))
                return
            self._prepared(how)

    def _prepared(self, how: WorkerPreparation) -> None:
        self.preparation, self.ready_at = how, self._kernel.now
        self._has_announced = how is WorkerPreparation.READY
        self._training.checker.met[f"prepared workers: {how.value}"] += 1
        self.version += 1
        self.pod.agent_changed()

    def stop(self, body: dict[str, Any]) -> CallDecision:
        """POST /stop."""
        graceful = bool(body.get("is_graceful"))
        answer = decide_stop(self._fence_state(), body.get("generation"), is_graceful=graceful)
        if answer.verdict is not CallVerdict.REFUSE and body.get("generation") is not None:
            self.newest_stopped = max(self.newest_stopped, body["generation"])
        if (
            answer.verdict is CallVerdict.NOTHING
            and graceful
            and self.state is S.STOPPING
            and self._stop is StopMode.GRACEFUL
        ):
            stops = self._stops
            self.leaves = bool(body.get("leaves")) or self.leaves
            self._kernel.after(float(body["timeout"]), lambda: self._out_of_time(stops))
        self._training.checker.stopped(self.generation, self._kernel.now)
        is_kept = self.make.keeps_state and keeps_processes(body.get("restart_mode") or "", is_graceful=graceful)
        if answer.verdict is not CallVerdict.ACT:
            if answer.verdict is CallVerdict.NOTHING and self.state is S.READY and not is_kept:
                self._forget_memory()
            return answer
        if graceful and self.state is S.RUNNING:
            self._stop = StopMode.GRACEFUL
            self._stops += 1
            self.leaves = body.get("leaves")
            self._judged_at = self._kernel.now + ANSWER_S
            self._kernel.after(ANSWER_S, self._look_for_answers)
            self.drains_in_memory = is_kept and bool(body.get("restart_mode"))
            self._enter(S.STOPPING)
            self._training.raise_event(self.generation)
            stops = self._stops
            self._kernel.after(float(body["timeout"]), lambda: self._out_of_time(stops))
        else:
            self._stop = StopMode.HARD
            if not is_kept and (body.get("restart_mode") or self.make is not Make.IN_PROCESS):
                self.processes_since = 0
            if self.state is not S.STOPPING:
                self._enter(S.STOPPING)
            if is_kept:
                self._call_workers_back()
            else:
                self._forget_memory()
            self._kill_workers(reason=None)
        return answer

    def _call_workers_back(self) -> None:
        """Workers return to the barrier with what they hold; who has failed gets a new process that holds nothing."""
        run = self._training.runs.get(self.generation)
        if self._working and run is not None:
            self.held = self._holds(run)

    def _holds(self, run: Run) -> Image | None:
        """Give what its workers hold after a run; before they were filled, it is what they held before it."""
        newest = run.newest
        if newest is None:
            return self.held
        return (
            Image(newest, frozenset({self.rank, *self.taken}), run.nnodes)
            if self.make is Make.SHARDING
            else Image(newest)
        )

    def _forget_memory(self) -> None:
        if self._has_announced:
            self.held, self._has_announced, self.preparation = None, False, None
            self.version += 1
            self.pod.agent_changed()

    def _look_for_answers(self) -> None:
        if self.alive and self._is_unanswered():
            self.version += 1
            self.pod.agent_changed()

    def shut_down(self) -> None:
        """POST /shutdown."""
        if self.state is not S.SHUTDOWN:
            self._leave()

    def status(self) -> dict[str, Any]:
        """GET /status, as it is told."""
        told = self._truth()
        if self.lie is None or self._kernel.now >= self.lies_until:
            return told
        self._training.checker.met[f"agent: lies {self.lie.value}"] += 1
        self._training.touched(self, "a lie")  # whichever generation it is of, when it is believed
        return told | _LIES[self.lie](told)

    def _truth(self) -> dict[str, Any]:
        if self.make is Make.FOREIGN:
            return {"status": self.state.value, "reason": self.reason}
        run = self._training.runs.get(self.generation)
        failure = self.failure
        told: dict[str, Any] = {
            "status": self.state.value, "reason": self.reason, "message": failure.message if failure else None,
            "protocol": 1, "features": ["reach"] * self.tells_of_others + ["prepare"] * (self.preparing is not None),
            "preparation": self.preparation.value if self.preparation is not None else None,
            "version": self.version, "generation": self.generation, "drained": self.drained,
            "terminating": self.terminating, "boot_id": self.pod.uid, "spare": str(self.is_spare),
            "saving": self._stop is StopMode.GRACEFUL and run is not None and run.is_saving,
            "unanswered": self._is_unanswered(),
            "failure": {"global_rank": self.rank, "exitcode": failure.exitcode, "signal": failure.signal,
                        "message": failure.message} if failure else None,
            "worker": {"step": run.step if run is not None and run.steps_made else None},
        }  # fmt: skip
        if self.make is Make.IN_PROCESS:
            asked = failure.asks if failure is not None and self.state is not S.READY else ""
            told["restartMode"] = asked or IN_PROCESS
            told["worker_data"] = self._worker_data() if self.processes_since else []
        if self.make.keeps_state:
            asked = failure.asks if failure is not None and self.state is S.FAULTED else ""
            told["restartMode"] = asked or (IN_PROCESS if self.state is S.FAULTED else "process_level_restart")
            is_parked = self.state is S.READY and self.preparation is None
            kind = "sharded" if self.make is Make.SHARDING else "replicated"
            kept = {"kind": kind, "kept": int(self.held is not None) if is_parked else None}
            told["in_memory"] = kept if self._has_announced else None
        return told

    def _worker_data(self) -> list[dict[str, Any]]:
        about = {"rank": self.rank, "group_rank": self.rank, "local_rank": 0, "failed": self.failure is not None}
        return [about | {"data": f"{self.pod.uid} in {self.generation}"}]

    def _is_unanswered(self) -> bool:
        """Whether no worker can know of the drain, as an agent finds out after some seconds."""
        is_draining = self.state is S.STOPPING and self._stop is StopMode.GRACEFUL
        return is_draining and not self._training.heeds_events and self._kernel.now >= self._judged_at

    def hangs(self) -> bool:
        """Whether the process stands still; its workers go on."""
        return self._kernel.now < self.hangs_until

    def _is_awake(self) -> bool:
        return self.pod.node_runs() and not self.hangs()

    # -- life

    def begin(self) -> None:
        """The process listens."""
        if self.alive and self.state is S.INIT:
            self._enter(S.READY)

    def sigterm(self) -> None:
        """The kubelet asks the pod to end: busy workers go on until they are drained."""
        if not self.alive or self.terminating:
            return
        if not self._is_awake():
            self._kernel.after(1.0, self.sigterm)
            return
        self.terminating = True
        self.version += 1
        if not self._working or self.state is S.FAULTED:
            self._leave()
        self.pod.agent_changed()

    def die(self) -> None:
        """The container is gone at once."""
        if self.alive:
            self.alive = False
            if self._working:
                self._working = False
                self._training.workers_ended(self, self.generation)

    def vanish(self) -> None:
        """Power loss: nobody is told."""
        self.alive = self._working = False

    # -- workers

    def works(self, generation: int) -> bool:
        """Whether the workers of a generation take part in collectives right now."""
        return self.alive and self._working and self.generation == generation and self.pod.node_runs()

    def crash(self, crash: Crash) -> None:
        """A worker fails by itself."""
        if self.alive and self._working:
            self._working, self.held = False, None
            self._training.workers_ended(self, self.generation)
            self._failed(crash)

    def peer_lost(self, generation: int) -> None:
        """The collective broke: the workers here fail too."""
        if not self.alive or self.generation != generation or not self._working:
            return
        if not self._is_awake():
            self._kernel.after(1.0, lambda: self.peer_lost(generation))
            return
        if self.make.keeps_state:
            self._call_workers_back()
            self._working = False
            self._kernel.after(TELL_AFTER_S, lambda: self._tell_of_peers(generation))
            return
        self._working = False
        self._failed(Crash(1, None, "RuntimeError: connection closed by peer"))

    def _tell_of_peers(self, generation: int) -> None:
        """Workers at the barrier whose collective failed, and whom nobody has called back."""
        if self.alive and self.generation == generation and self.state is S.RUNNING and not self._working:
            if not self._is_awake():
                self._kernel.after(1.0, lambda: self._tell_of_peers(generation))
                return
            self._failed(Crash(None, None, "a collective failed", "CollectiveFailed"))

    def workers_exited(self, generation: int, *, acknowledged: bool) -> None:
        """The workers ended with exit code 0."""
        if not self.alive or self.generation != generation or not self._working:
            return
        if not self._is_awake():
            self._kernel.after(1.0, lambda: self.workers_exited(generation, acknowledged=acknowledged))
            return
        self._working = False
        run = self._training.runs[generation]
        if acknowledged and self._has_announced:
            self.held = self._holds(run)
        elif self._has_announced:
            self._forget_memory()
        outcome = classify([WorkerExit(0, 0, acknowledged)], self._stop)
        if outcome is Outcome.DRAINED:
            if self.state is S.RUNNING:
                self._enter(S.STOPPING)
            self.drained = True
            self._enter(S.READY, reason="Drained")
        elif self.state is S.STOPPING:
            self._enter(S.READY, reason=None)
        else:
            self._enter(S.COMPLETED)
        self._leave_if_terminating()

    def _failed(self, crash: Crash) -> None:
        self.failure = crash
        if self.state is S.RUNNING:
            self._enter(S.FAULTED, reason=crash.reason)
        elif self.state is S.STOPPING:
            self._enter(S.READY, reason=crash.reason)
        self._leave_if_terminating()

    def _out_of_time(self, stops: int) -> None:
        if self.alive and self.state is S.STOPPING and self._stop is StopMode.GRACEFUL and self._stops == stops:
            if not self._is_awake():
                self._kernel.after(1.0, lambda: self._out_of_time(stops))
                return
            self._forget_memory()
            self._kill_workers(reason="DrainTimedOut")

    def _kill_workers(self, reason: str | None) -> None:
        generation = self.generation
        if self._working:
            self._working = False
            self._training.workers_ended(self, generation)

        def killed() -> None:
            if self.alive and self.state is S.STOPPING and self.generation == generation:
                self._enter(S.READY, reason=reason)
                self._leave_if_terminating()

        self._kernel.after(self._rng.uniform(0.05, 0.8), killed)

    def _leave_if_terminating(self) -> None:
        if self.terminating:
            self._kernel.after(LEAVES_AFTER_S, self._leave)

    def _leave(self) -> None:
        if not self.alive or self.state is S.SHUTDOWN:
            return
        if self.terminating and self.make is Make.SHARDING and self.held is not None and not self.has_given:
            self._training.touched(self, "its pod ends with the only copy of a shard, after the others have stopped")
        self._enter(S.SHUTDOWN)
        if self._working:
            self._working = False
            self._training.workers_ended(self, self.generation)
        self._kernel.after(self._rng.uniform(0.1, 0.5), self.pod.container_exits)

    def _enter(self, state: S, *, reason: str | None = None) -> None:
        self.state = move(self.state, state)
        self.reason = reason
        self.version += 1
        self.pod.agent_changed()

    def _fence_state(self) -> FenceState:
        return FenceState(
            state=self.state, generation=self.generation, newest_stopped=self.newest_stopped,
            draining=self.state is S.STOPPING and self._stop is StopMode.GRACEFUL, terminating=self.terminating,
        )  # fmt: skip


_LIES: dict[Lie, Callable[[dict[str, Any]], dict[str, Any]]] = {
    Lie.NONSENSE: lambda told: {"status": "dancing"},
    Lie.OLDER: lambda told: {"generation": max(0, told["generation"] - 1)},
    Lie.NEWER: lambda told: {"generation": told["generation"] + 3},
    Lie.ENORMOUS: lambda told: {"generation": 2**53},
    Lie.FAULTED: lambda told: {"status": "faulted", "reason": "WorkerCrash", "message": "a lie"},
    Lie.COMPLETED: lambda told: {"status": "completed"},
    Lie.STOPPED: lambda told: {"status": "ready"},
    Lie.DRAINED: lambda told: {"status": "ready", "drained": True, "reason": "Drained"},
    Lie.ENDLESS: lambda told: {
        "worker_data": ["x" * MAX_WORKER_DATA_BYTES],
        "progress": {"x": "x" * MAX_PROGRESS_BYTES},
    },
}
