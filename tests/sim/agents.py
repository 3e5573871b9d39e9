"""The model of an agent in its pod: the real fences and states of the agent's core, with modelled workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.agent_process import AgentProcess
from tests.sim.agent_words import LIES
from tests.sim.events import Make
from tests.sim.training import MeetingPlace

from elastipod_agent.core.exits import StopMode
from elastipod_agent.core.fences import (
    CallDecision,
    CallVerdict,
    decide_prepare,
    decide_start,
    decide_stop,
)
from elastipod_agent.core.inprocess_restart import WorkerPreparation, keeps_processes
from elastipod_agent.core.states import AgentState as S

if TYPE_CHECKING:
    pass

ANSWER_S = 5.0


IN_PROCESS = "in_process_restart"


class SimAgent(AgentProcess):
    """An agent: what it answers to the calls of the operator, and what it tells of itself."""

    def _take_following(self, body: dict[str, Any] | None) -> None:
        if body != self.following:
            self.following = body
            self.version += 1
            self.pod.agent_changed()

    def begin_following(self) -> None:
        """The workers have drained: begin the generation that the /stop has named, if they hold what they are to bring."""
        following, self.following = self.following, None
        if following is not None and self.held is not None and not self.terminating:
            self._training.checker.met["in memory: an agent begins the next generation by itself"] += 1
            self.start(following)

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
            self.leaves, self.restart_mode, self.taken, self.has_given = None, "", set(), False
            self._enter(S.RUNNING, reason=None)
            self._training.join(self, self.generation, body["rank"], body["nnodes"], _meeting_place(body))
        return answer

    def prepare(self, body: dict[str, Any]) -> CallDecision:
        """POST /prepare."""
        has_workers = self._has_announced or self.preparation in (WorkerPreparation.BEGUN, WorkerPreparation.READY)
        answer = decide_prepare(self._fence_state(), body.get("generation"), has_workers=has_workers)
        if answer.verdict is CallVerdict.ACT:
            self._begin_before_start()
        return answer

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
        if answer.verdict is not CallVerdict.REFUSE:
            self._take_following(body.get("next") if graceful and self.state in (S.RUNNING, S.STOPPING) else None)
        if answer.verdict is not CallVerdict.ACT:
            if answer.verdict is CallVerdict.NOTHING and self.state is S.READY and not is_kept:
                self._forget_memory()
            return answer
        if graceful and self.state is S.RUNNING:
            self._stop = StopMode.GRACEFUL
            self._stops += 1
            self.leaves, self.restart_mode = body.get("leaves"), body.get("restart_mode") or ""
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
        return told | LIES[self.lie](told)

    def _truth(self) -> dict[str, Any]:
        if self.make is Make.FOREIGN:
            return {"status": self.state.value, "reason": self.reason}
        run = self._training.runs.get(self.generation)
        failure = self.failure
        told: dict[str, Any] = {
            "status": self.state.value, "reason": self.reason, "message": failure.message if failure else None,
            "protocol": 1, "features": self._features(),
            "preparation": self.preparation.value if self.preparation is not None else None,
            "version": self.version, "generation": self.generation,
            "next_generation": self.following["generation"] if self.state is S.STOPPING and self.following else None,
            "drained": self.drained, "terminating": self.terminating, "boot_id": self.pod.uid, "spare": str(self.is_spare),
            "saving": self._stop is StopMode.GRACEFUL and run is not None and run.is_saving,
            "unanswered": self._is_unanswered(),
            "failure": {"global_rank": self.rank * self.pod.nproc + failure.local_rank, "exitcode": failure.exitcode,
                        "signal": failure.signal, "message": failure.message} if failure else None,
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

    def _features(self) -> list[str]:
        """Give what this agent can do beyond the first protocol. Some are of a version without a store."""
        has = {"reach": self.tells_of_others, "prepare": self.preparing is not None, "store": self.serves_store,
               "next": self.begins_next}  # fmt: skip
        return [name for name, is_there in has.items() if is_there]

    def _worker_data(self) -> list[dict[str, Any]]:
        failed = self.failure.local_rank if self.failure is not None else None
        first = self.rank * self.pod.nproc
        return [
            {"rank": first + local, "group_rank": self.rank, "local_rank": local, "failed": local == failed}
            | {"data": f"{self.pod.uid} in {self.generation}"}
            for local in range(self.pod.nproc)
        ]

    def _is_unanswered(self) -> bool:
        """Whether no worker can know of the drain, as an agent finds out after some seconds."""
        is_draining = self.state is S.STOPPING and self._stop is StopMode.GRACEFUL
        return is_draining and not self._training.heeds_events and self._kernel.now >= self._judged_at


def _meeting_place(body: dict[str, Any]) -> MeetingPlace:
    return MeetingPlace(body["master_addr"], body["master_port"], body.get("store_port"))
