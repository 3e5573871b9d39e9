"""The life of the process of an agent, and of the workers under it: how they begin, fail and end, and what they keep in memory."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.agent_words import Crash, Lie
from tests.sim.events import Make, Preparing
from tests.sim.kernel import Kernel
from tests.sim.training import Image, Run, Training

from elastipod_agent.core.exits import Outcome, StopMode, WorkerExit, classify
from elastipod_agent.core.fences import (
    FenceState,
)
from elastipod_agent.core.inprocess_restart import WorkerPreparation, is_followed_by_new_processes, keeps_processes
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.core.states import move
from elastipod_agent.server.http import Admission, admit_everybody
from elastipod_agent.server.http_messages import Head

if TYPE_CHECKING:
    from tests.sim.objects import SimPod

LEAVES_AFTER_S = 2.0
TELL_AFTER_S = 10.0
# From the end of workers to a decision that knows of it: a heartbeat, and the way of the answer.
HEARD_S = 6.0


class AgentProcess:
    """The process with its workers: how they begin, work, fail and end. `alive` ends with its container."""

    def __init__(self, kernel: Kernel, rng: Random, training: Training, pod: SimPod, make: Make) -> None:
        self._kernel = kernel
        self._rng = rng
        self._training = training
        self.pod = pod
        self.make = make
        self.tells_of_others = True
        """Whether it can be asked if it reaches another agent."""
        self.serves_store = make is not Make.FOREIGN and zlib.crc32(pod.uid.encode()) % 4 > 0
        """Whether its version knows stores that agents serve."""
        self.begins_next = make.keeps_state and zlib.crc32(pod.uid.encode()) % 8 > 0
        """Whether its version begins the generation after a drain by itself."""
        self.following: dict[str, Any] | None = None
        """The body of the /start that it carries out once its workers have drained."""
        self.admit: Callable[[Head], Admission] = admit_everybody
        """Who may call it."""
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
        self.restart_mode = ""
        """What that drain asks for."""
        self.taken: set[int] = set()
        """Parts that ranks which leave have given to its workers."""
        self.has_given = False
        """Another pod has the part of its workers."""
        self._has_announced = False
        self.alive = True
        self.state, self.entered_at = S.INIT, kernel.now
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
        self._exits_of = 0
        """The generation of which one worker has ended, though not all."""

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

    def takes_start(self) -> bool:
        """Whether its workers are at the barrier, its pod is not being deleted, and the operator can know both."""
        is_there = self.alive and self._is_awake() and self.pod.answers() and self.pod.deleted_at is None
        is_delayed = self._kernel.now < max(self.lags_until, self.lies_until)
        return is_there and not is_delayed and self.state is S.READY and not self.terminating

    def has_told_its_end(self) -> bool:
        """Whether the operator must know by now that the workers here have finished."""
        is_heard = self.alive and self.pod.answers() and self.pod.deleted_at is None
        is_old = self._kernel.now - max(self.entered_at, self.lags_until, self.lies_until, self.hangs_until) > HEARD_S
        return self.state is S.COMPLETED and is_heard and is_old

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
            self.pod.agent_changed()  # its connections close

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
        if self.pod.nproc > 1 and self._exits_of < generation:  # one of them ends first, and the others may yet fail
            self._exits_of = generation
            again = lambda: self.workers_exited(generation, acknowledged=acknowledged)  # noqa: E731
            self._kernel.after(self._rng.uniform(0.05, 0.5), again)
            return
        self._working = False
        run = self._training.runs[generation]
        could_be_kept = self._has_announced
        if acknowledged and could_be_kept and keeps_processes(self.restart_mode, is_graceful=True):
            self.held = self._holds(run)
        elif self._has_announced:
            self._forget_memory()
        # A script may ask for the event on one rank alone.
        exits = [WorkerExit(local, 0, acknowledged and not local) for local in range(self.pod.nproc)]
        outcome = classify(exits, self._stop)
        if outcome is Outcome.DRAINED:
            if self.state is S.RUNNING:
                self._enter(S.STOPPING)
            self.drained = True
            self._enter(S.READY, reason="Drained")
            has_successors = is_followed_by_new_processes(outcome, self.restart_mode, leaves=self.leaves)
            if could_be_kept and has_successors and not self.terminating:
                self._begin_before_start()
            self.begin_following()
        elif self.state is S.STOPPING:
            self._enter(S.READY, reason=None)
        else:
            self._enter(S.COMPLETED)
        self._leave_if_terminating()

    def begin_following(self) -> None:
        """The workers have drained."""
        raise NotImplementedError

    def _failed(self, crash: Crash) -> None:
        self.failure = crash
        if self.state is S.RUNNING:
            self._enter(S.FAULTED, reason=crash.reason)
        elif self.state is S.STOPPING:
            if self._stop is StopMode.GRACEFUL:
                self._forget_memory()  # its new processes have not announced anything
            self._enter(S.READY, reason=crash.reason)
        self._leave_if_terminating()

    def _out_of_time(self, stops: int) -> None:
        if self.alive and self.state is S.STOPPING and self._stop is StopMode.GRACEFUL and self._stops == stops:
            if not self._is_awake():
                self._kernel.after(1.0, lambda: self._out_of_time(stops))
                return
            if self.drains_in_memory and not self.leaves:
                self._call_workers_back()
            else:
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
        self.state, self.entered_at = move(self.state, state), self._kernel.now
        self.reason = reason
        self.version += 1
        self.pod.agent_changed()

    def _fence_state(self) -> FenceState:
        return FenceState(
            state=self.state, generation=self.generation, newest_stopped=self.newest_stopped,
            draining=self.state is S.STOPPING and self._stop is StopMode.GRACEFUL, terminating=self.terminating,
        )  # fmt: skip

    # -- workers that start ahead of their run

    def _begin_before_start(self) -> None:
        """Start workers that wait at the barrier for the next /start."""
        how = self.preparing
        if how is None:
            return
        self._prepared(WorkerPreparation.BEGUN)
        if how is not Preparing.HANGS:
            first = WorkerPreparation.FAILED if how is Preparing.FAILS else WorkerPreparation.READY
            self._kernel.after(self._rng.uniform(1.0, 6.0), lambda: self._come_to(first))
        if how is Preparing.DIES:
            self._kernel.after(6.0 + self._rng.uniform(0.1, 4.0), lambda: self._come_to(WorkerPreparation.FAILED))

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

    # -- what workers keep in memory

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
