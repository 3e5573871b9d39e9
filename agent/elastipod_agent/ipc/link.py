"""The agent's end of the socket in one piece: it listens, passes faults on, and shows what workers report."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastipod_agent.clock import utc_now
from elastipod_agent.core.worker_env import Layout
from elastipod_agent.generation import Fault
from elastipod_agent.ipc.ipc_server import IpcServer
from elastipod_agent.ipc.run_coordinator import Exchange, SentFault
from elastipod_agent.status import Board
from elastipod_agent.workers.failure import Failure

NEWS_S = 0.1  # how long reports are collected: a worker that talks all the time must not keep the operator busy
SOCKET_NAME = "ipc.sock"


class WorkerLink:
    """Between the workers of this pod and the board. root: the agent's private folder."""

    def __init__(self, layout: Layout, root: Path, board: Board, on_fault: Callable[[Fault], None]) -> None:
        self.exchange = Exchange(layout, on_fault=self._sent, on_news=self._collect)
        self._server = IpcServer(self.exchange, root / SOCKET_NAME)
        self._board = board
        self._on_fault = on_fault
        self._news: asyncio.TimerHandle | None = None

    async def listen(self) -> None:
        """Begin to serve. Raises OSError."""
        await self._server.listen()

    async def close(self) -> None:
        """Hang up."""
        if self._news is not None:
            self._news.cancel()
        await self._server.close()

    def reported(self) -> dict[str, Any]:
        """Give the fields of the status that workers fill."""
        return {
            "worker_data": self.exchange.worker_data(),
            "rank_labels": self.exchange.labels(),
            "progress": self.exchange.checkpoints.progress(),
        }

    def _collect(self) -> None:
        if self._news is None:
            self._news = asyncio.get_running_loop().call_later(NEWS_S, self._show)

    def _show(self) -> None:
        self._news = None
        self._board.set(**self.reported())

    def _sent(self, sent: SentFault) -> None:
        failure = Failure(
            global_rank=sent.global_rank,
            local_rank=sent.local_rank,
            exitcode=None,
            signal=None,
            message=sent.message,
            time=utc_now(),
        )
        self._on_fault(Fault(sent.reason, failure, sent.restart_mode))
