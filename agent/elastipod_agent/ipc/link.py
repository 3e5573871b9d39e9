"""The agent's side of the socket: listens, passes faults on, and puts the workers' reports into the status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastipod_agent.clock import utc_now
from elastipod_agent.core.nccl_env import nccl_env
from elastipod_agent.core.worker_env import Layout
from elastipod_agent.generation.faults import Fault
from elastipod_agent.ipc.ipc_server import IpcServer
from elastipod_agent.ipc.run_coordinator import ReportedFault, RunCoordinator
from elastipod_agent.status import StatusStore
from elastipod_agent.workers.failure import Failure

REPORT_DELAY_S = 0.1  # reports are collected this long: frequent reports must not keep the operator busy
SOCKET_NAME = "ipc.sock"


class WorkerLink:
    """Connects the workers of this pod with the status store. environ: the agent's own. root: its private folder."""

    def __init__(
        self,
        layout: Layout,
        environ: Mapping[str, str],
        root: Path,
        status: StatusStore,
        on_fault: Callable[[Fault], None],
    ) -> None:
        self.coordinator = RunCoordinator(
            layout,
            on_fault=self._on_reported_fault,
            on_report=self._schedule_report,
            keep_env=nccl_env(environ, keeps_processes=True),
        )
        self._server = IpcServer(self.coordinator, root / SOCKET_NAME)
        self._status = status
        self._on_fault = on_fault
        self._report_timer: asyncio.TimerHandle | None = None

    async def listen(self) -> None:
        """Start to serve. Raises OSError."""
        await self._server.listen()

    async def close(self) -> None:
        """Close all connections."""
        if self._report_timer is not None:
            self._report_timer.cancel()
        await self._server.close()

    def reported(self) -> dict[str, Any]:
        """Give the fields of the status that come from workers."""
        return {
            "worker_data": self.coordinator.worker_data(),
            "rank_labels": self.coordinator.labels(),
            "progress": self.coordinator.checkpoints.progress(),
            "kept_state": self.coordinator.kept_state,
        }

    def _schedule_report(self) -> None:
        if self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(REPORT_DELAY_S, self._publish)

    def _publish(self) -> None:
        self._report_timer = None
        self._status.set(**self.reported())

    def _on_reported_fault(self, sent: ReportedFault) -> None:
        failure = Failure(
            global_rank=sent.global_rank,
            local_rank=sent.local_rank,
            exitcode=None,
            signal=None,
            message=sent.message,
            time=utc_now(),
        )
        self._on_fault(Fault(sent.reason, failure, sent.restart_mode))
