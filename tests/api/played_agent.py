"""A modelled agent, with the real agent's fences and states; training in it is nothing but a state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tests.agent_model import AgentModel

from elastipod_agent.core.states import AgentState as S

DRAIN_S = 0.05
LEAVE_S = 10.0
NO_DATA = "ValueError: no such data"


class PlayedAgent(AgentModel):
    """The agent of one pod. `manner`: deaf (its workers never ask for elastic events), faulty (they crash before their first step)."""

    def __init__(self, pod: str, manner: str, starts: list[dict[str, Any]]) -> None:
        super().__init__()
        self.pod = pod
        self.manner = manner
        self.starts = starts
        self.left: Callable[[], None] | None = None
        self._changed = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None

    def shut_down(self) -> bool:
        is_new = super().shut_down()
        if is_new and self.left is not None:
            self.left()
        return is_new

    def status(self) -> dict[str, Any]:
        is_training = self.state in (S.RUNNING, S.STOPPING, S.COMPLETED) and self.manner != "faulty"
        return super().status() | {"worker": {"step": 1 if is_training else None}}

    async def newer(self, after: str | None, wait_s: float) -> None:
        """Hold a long poll."""
        if after == str(self.version):
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()

    # -- life

    def complete(self) -> None:
        """The script is through."""
        if self.state is S.RUNNING:
            self.enter(S.COMPLETED)

    def close(self) -> None:
        """The container is gone."""
        if self._later is not None:
            self._later.cancel()
        self.tell()

    def started(self, body: dict[str, Any]) -> None:
        self.starts.append(body)
        if self.manner == "faulty":
            self._soon(DRAIN_S, lambda: self.crash(NO_DATA))

    def stops(self, body: dict[str, Any]) -> None:
        if not self.draining:
            self._soon(DRAIN_S, lambda: self.stopped(drained=False, reason=None))
        elif self.manner == "deaf":
            self._soon(float(body["timeout"]), lambda: self.stopped(drained=False, reason="DrainTimedOut"))
        else:
            self._soon(DRAIN_S, lambda: self.stopped(drained=True, reason="Drained"))

    def tell(self) -> None:
        super().tell()
        self._changed.set()
        self._changed = asyncio.Event()

    def _soon(self, delay_s: float, call: Callable[[], object]) -> None:
        if self._later is not None:
            self._later.cancel()
        self._later = asyncio.get_running_loop().call_later(delay_s, call)
