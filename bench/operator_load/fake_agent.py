"""A fake agent: the states, fences and answers of docs/design/contracts.md (3), without workers; training is only a state."""

from __future__ import annotations

import json
import time
from typing import Any

from elastipod_agent.core.fences import CallVerdict, FenceState, decide_start, decide_stop
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.core.states import move

STEP_S = 0.25
CRASH = {
    "global_rank": 0,
    "local_rank": 0,
    "exitcode": 1,
    "signal": None,
    "message": "ValueError: the benchmark did it",
}


class FakeAgent:
    """The agent of one pod. It is READY, or INIT while the benchmark holds it back.

    Workers start and stop at once. A training worker makes a step every STEP_S, and every answer tells the newest.
    """

    def __init__(self, *, held: bool) -> None:
        self.state = S.INIT if held else S.READY
        self.version = 1
        self.generation = self.newest_stopped = 0
        self.started_at = 0.0
        self._reason: str | None = None
        self._drained = self._is_spare = False
        self._failure: dict[str, Any] | None = None
        self._head = b""
        self._tell()

    def call(self, path: str, body: dict[str, Any]) -> int:
        """Take a POST; gives the HTTP code. Pending requests for a newer version are answered after it."""
        if path == "/start":
            return self._start(body)
        if path == "/stop":
            return self._stop(body)
        if path == "/shutdown":
            if self.state is not S.SHUTDOWN:
                self._enter(S.SHUTDOWN)
            return 200
        return 200 if path == "/update" else 404

    def release(self) -> None:
        """End the holding back: the agent is READY."""
        if self.state is S.INIT:
            self._enter(S.READY)

    def crash(self) -> bool:
        """Let a worker fail; False when none runs."""
        if self.state is not S.RUNNING:
            return False
        self._failure = CRASH
        self._enter(S.FAULTED, "WorkerCrash")
        return True

    def status(self) -> bytes:
        """Give the body of GET /status."""
        if self.state is S.RUNNING:
            now = time.time()
            step = int((now - self.started_at) / STEP_S)
            return self._head + b',"worker":{"step":%d,"samples":%d,"loss":0.5,"time":%.3f}}' % (step, 32 * step, now)
        return self._head + b"}"

    def _start(self, body: dict[str, Any]) -> int:
        answer = decide_start(self._fence_state(), body.get("generation"))
        if answer.verdict is CallVerdict.ACT:
            self.generation = body["generation"]
            self._is_spare = bool(body.get("spare"))
            self._drained, self._failure = False, None
            if self._is_spare:
                self._tell()
            else:
                self.started_at = time.time()
                self._enter(S.RUNNING)
        return 409 if answer.verdict is CallVerdict.REFUSE else 200

    def _stop(self, body: dict[str, Any]) -> int:
        graceful = bool(body.get("is_graceful"))
        answer = decide_stop(self._fence_state(), body.get("generation"), is_graceful=graceful)
        if answer.verdict is not CallVerdict.REFUSE:
            self.newest_stopped = max(self.newest_stopped, body.get("generation") or 0)
        if answer.verdict is CallVerdict.ACT:
            self._enter(S.STOPPING)
            self._drained = graceful
            self._enter(S.READY, "Drained" if graceful else None)
        return 409 if answer.verdict is CallVerdict.REFUSE else 200

    def _enter(self, state: S, reason: str | None = None) -> None:
        self.state, self._reason = move(self.state, state), reason
        self._tell()

    def _tell(self) -> None:
        self.version += 1
        told = {
            "status": self.state.value, "reason": self._reason, "message": None, "protocol": 1, "version": self.version,
            "generation": self.generation, "drained": self._drained, "terminating": False, "warming": False,
            "boot_id": f"{id(self):x}", "failure": self._failure, "spare": str(self._is_spare), "progress": {},
            "restartMode": "process_level_restart",
        }  # fmt: skip
        self._head = json.dumps(told, separators=(",", ":")).encode()[:-1]

    def _fence_state(self) -> FenceState:
        return FenceState(state=self.state, generation=self.generation, newest_stopped=self.newest_stopped)
