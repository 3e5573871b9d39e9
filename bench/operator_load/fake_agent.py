"""A fake agent: the states, fences and answers of docs/design/contracts.md (3), without workers; training is only a state."""

from __future__ import annotations

import json
import time
from typing import Any

from tests.agent_model import AgentModel

from elastipod_agent.core.states import AgentState as S

STEP_S = 0.25


class FakeAgent(AgentModel):
    """The agent of one pod. It is READY, or INIT while the benchmark holds it back.

    Workers start and stop at once. A training worker makes a step every STEP_S, and every answer tells the newest.
    """

    def __init__(self, *, held: bool) -> None:
        super().__init__(S.INIT if held else S.READY)
        self.started_at = 0.0
        self._head = b""
        self.tell()

    def call(self, path: str, body: dict[str, Any]) -> int:
        """Take a POST; gives the HTTP code. Pending requests for a newer version are answered after it."""
        if path == "/start":
            return self.start(body)
        if path == "/stop":
            return self.stop(body)
        if path == "/shutdown":
            self.shut_down()
            return 200
        return 200 if path == "/update" else 404

    def release(self) -> None:
        """End the holding back: the agent is READY."""
        if self.state is S.INIT:
            self.enter(S.READY)

    def answer(self) -> bytes:
        """Give the body of GET /status."""
        if self.state is S.RUNNING:
            now = time.time()
            step = int((now - self.started_at) / STEP_S)
            return self._head + b',"worker":{"step":%d,"samples":%d,"loss":0.5,"time":%.3f}}' % (step, 32 * step, now)
        return self._head + b"}"

    def started(self, body: dict[str, Any]) -> None:
        self.started_at = time.time()

    def tell(self) -> None:
        super().tell()
        more = {
            "warming": False,
            "boot_id": f"{id(self):x}",
            "progress": {},
            "restartMode": "process_level_restart",
        }
        self._head = json.dumps(self.status() | more, separators=(",", ":")).encode()[:-1]
