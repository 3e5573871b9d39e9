"""The model of an agent without workers, for whoever needs many of them: training in it is nothing but a state.

It has the fences and states of the agent's own core. The nodes that a test plays (`tests/api/played_agent.py`) and the fleet of the
benchmarks (`bench/operator_load/fake_agent.py`) build on it. The simulator's agents have workers too (`tests/sim/agents.py`).
"""

from __future__ import annotations

from typing import Any

from elastipod_agent.core.fences import CallVerdict, FenceState, decide_start, decide_stop
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.core.states import move


class AgentModel:
    """The agent of one pod. What follows from a call is up to the methods that a subclass replaces."""

    def __init__(self, state: S = S.READY) -> None:
        self.state = state
        self.version = 1
        self.generation = self.newest_stopped = 0
        self.reason: str | None = None
        self.failure: dict[str, Any] | None = None
        self.drained = self.draining = self.terminating = self.is_spare = False

    def start(self, body: dict[str, Any]) -> int:
        """POST /start; gives the HTTP code."""
        answer = decide_start(self._fence_state(), body.get("generation"))
        if answer.verdict is CallVerdict.ACT:
            self.generation = body["generation"]
            self.is_spare = bool(body.get("spare"))
            self.drained, self.failure = False, None
            if self.is_spare:
                self.tell()
            else:
                self.enter(S.RUNNING)
                self.started(body)
        return 409 if answer.verdict is CallVerdict.REFUSE else 200

    def stop(self, body: dict[str, Any]) -> int:
        """POST /stop; gives the HTTP code."""
        graceful = bool(body.get("is_graceful"))
        answer = decide_stop(self._fence_state(), body.get("generation"), is_graceful=graceful)
        if answer.verdict is not CallVerdict.REFUSE:
            self.newest_stopped = max(self.newest_stopped, body.get("generation") or 0)
        if answer.verdict is CallVerdict.ACT:
            if self.state is not S.STOPPING:
                self.enter(S.STOPPING)
            self.draining = graceful
            self.stops(body)
        return 409 if answer.verdict is CallVerdict.REFUSE else 200

    def shut_down(self) -> bool:
        """POST /shutdown, or the kubelet's SIGTERM; False if it has been shut down before."""
        if self.state is S.SHUTDOWN:
            return False
        self.enter(S.SHUTDOWN)
        return True

    def crash(self, message: str) -> bool:
        """Let a worker fail; False when none runs."""
        if self.state is not S.RUNNING:
            return False
        self.failure = {"global_rank": 0, "local_rank": 0, "exitcode": 1, "signal": None, "message": message}
        self.enter(S.FAULTED, "WorkerCrash")
        return True

    def status(self) -> dict[str, Any]:
        """GET /status, without what it says of a worker."""
        return {
            "status": self.state.value, "reason": self.reason, "message": None, "protocol": 1, "version": self.version,
            "generation": self.generation, "drained": self.drained, "terminating": self.terminating,
            "failure": self.failure, "spare": str(self.is_spare),
        }  # fmt: skip

    # -- what follows

    def started(self, body: dict[str, Any]) -> None:
        """Workers have begun."""

    def stops(self, body: dict[str, Any]) -> None:
        """Workers are to end, which takes no time here."""
        self.stopped(drained=self.draining, reason="Drained" if self.draining else None)

    def stopped(self, *, drained: bool, reason: str | None) -> None:
        """Workers have ended, if they are still to."""
        if self.state is S.STOPPING:
            self.drained, self.draining = drained, False
            self.enter(S.READY, reason)

    def enter(self, state: S, reason: str | None = None) -> None:
        """Change the state as the agent's own table allows it."""
        self.state, self.reason = move(self.state, state), reason
        self.tell()

    def tell(self) -> None:
        """What the agent says has changed."""
        self.version += 1

    def _fence_state(self) -> FenceState:
        return FenceState(
            state=self.state, generation=self.generation, newest_stopped=self.newest_stopped, draining=self.draining,
            terminating=self.terminating,
        )  # fmt: skip
