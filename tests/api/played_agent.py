"""A modelled agent, with the real agent's fences and states; training in it is nothing but a state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import web

from elastipod_agent.core.fences import CallVerdict, FenceState, decide_start, decide_stop
from elastipod_agent.core.states import AgentState as S
from elastipod_agent.core.states import move

DRAIN_S = 0.05
LEAVE_S = 10.0


class PlayedAgent:
    """The agent of one pod. `manner`: deaf (its workers never ask for elastic events), faulty (they crash at once)."""

    def __init__(self, pod: str, manner: str, starts: list[dict[str, Any]]) -> None:
        self.pod = pod
        self.manner = manner
        self.state = S.READY
        self.version = 1
        self.generation = self.newest_stopped = 0
        self.starts = starts
        self.reason: str | None = None
        self.drained = self.draining = self.terminating = self.is_spare = False
        self.failure: dict[str, Any] | None = None
        self.left: Callable[[], None] | None = None
        self._changed = asyncio.Event()
        self._later: asyncio.TimerHandle | None = None

    # -- calls

    def start(self, body: dict[str, Any]) -> int:
        """POST /start; gives the HTTP code."""
        answer = decide_start(self._fence_state(), body.get("generation"))
        if answer.verdict is CallVerdict.ACT:
            self.generation = body["generation"]
            self.is_spare = bool(body.get("spare"))
            self.drained, self.failure = False, None
            if not self.is_spare:
                self.starts.append(body)
                self._enter(S.RUNNING)
                if self.manner == "faulty":
                    self._soon(DRAIN_S, self._crash)
            else:
                self._tell()
        return 409 if answer.verdict is CallVerdict.REFUSE else 200

    def stop(self, body: dict[str, Any]) -> int:
        """POST /stop; gives the HTTP code."""
        graceful = bool(body.get("is_graceful"))
        answer = decide_stop(self._fence_state(), body.get("generation"), is_graceful=graceful)
        if answer.verdict is not CallVerdict.REFUSE:
            self.newest_stopped = max(self.newest_stopped, body.get("generation") or 0)
        if answer.verdict is not CallVerdict.ACT:
            return 409 if answer.verdict is CallVerdict.REFUSE else 200
        if self.state is not S.STOPPING:
            self._enter(S.STOPPING)
        self.draining = graceful
        if not graceful:
            self._soon(DRAIN_S, lambda: self._stopped(drained=False, reason=None))
        elif self.manner == "deaf":
            self._soon(float(body["timeout"]), lambda: self._stopped(drained=False, reason="DrainTimedOut"))
        else:
            self._soon(DRAIN_S, lambda: self._stopped(drained=True, reason="Drained"))
        return 200

    def shut_down(self) -> None:
        """POST /shutdown, or the kubelet's SIGTERM."""
        if self.state is not S.SHUTDOWN:
            self._enter(S.SHUTDOWN)
            if self.left is not None:
                self.left()

    def status(self) -> dict[str, Any]:
        """GET /status."""
        is_training = self.state in (S.RUNNING, S.STOPPING, S.COMPLETED)
        return {
            "status": self.state.value, "reason": self.reason, "protocol": 1, "version": self.version,
            "generation": self.generation, "drained": self.drained, "terminating": self.terminating,
            "failure": self.failure, "spare": str(self.is_spare), "worker": {"step": 1 if is_training else None},
        }  # fmt: skip

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
            self._enter(S.COMPLETED)

    def close(self) -> None:
        """The container is gone."""
        if self._later is not None:
            self._later.cancel()
        self._tell()

    def _stopped(self, *, drained: bool, reason: str | None) -> None:
        if self.state is S.STOPPING:
            self.drained, self.draining = drained, False
            self._enter(S.READY, reason)

    def _crash(self) -> None:
        if self.state is S.RUNNING:
            self.failure = {"global_rank": 0, "exitcode": 1, "signal": None, "message": "ValueError: no such data"}
            self._enter(S.FAULTED, "WorkerCrash")

    def _enter(self, state: S, reason: str | None = None) -> None:
        self.state, self.reason = move(self.state, state), reason
        self._tell()

    def _tell(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    def _soon(self, delay_s: float, call: Callable[[], None]) -> None:
        if self._later is not None:
            self._later.cancel()
        self._later = asyncio.get_running_loop().call_later(delay_s, call)

    def _fence_state(self) -> FenceState:
        return FenceState(
            state=self.state, generation=self.generation, newest_stopped=self.newest_stopped, draining=self.draining,
            terminating=self.terminating,
        )  # fmt: skip


async def _shut(runner: web.AppRunner) -> None:
    """End a server. asyncio loses a connection that it accepted just before that, so it accepts no more some turns earlier."""
    servers: list[Any] = [site._server for site in runner.sites if isinstance(site, web.TCPSite)]
    for listening in (sock for server in servers if server is not None for sock in server.sockets):
        asyncio.get_running_loop().remove_reader(listening.fileno())
    await asyncio.sleep(0.02)
    await runner.cleanup()
