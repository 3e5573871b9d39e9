"""The agent's side of its socket, for tests of what workers tell it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S

from elastipod.ipc.clients import CheckpointDiscoverySocketClient, InProcessRestartSocketClient
from elastipod.ipc.protocol import PROTOCOL
from elastipod_agent.core.inprocess_restart import RankPosition
from elastipod_agent.core.requests import StartRequest
from elastipod_agent.core.worker_env import Layout
from elastipod_agent.ipc.ipc_server import IpcServer
from elastipod_agent.ipc.run_coordinator import ReportedFault, RunCoordinator

NPROC = 2


class Pod:
    """The agent's side: a coordinator behind a server, and what it was told."""

    def __init__(self, path: Path) -> None:
        self.faults: list[ReportedFault] = []
        self.num_reports = 0
        layout = Layout(nproc=NPROC, run_id="x", role="default", max_restarts=0)
        self.coordinator = RunCoordinator(layout, on_fault=self.faults.append, on_report=self._on_report)
        self.server = IpcServer(self.coordinator, path)
        self.clients: list[Any] = []

    def _on_report(self) -> None:
        self.num_reports += 1

    async def client(self, local_rank: int = 0) -> InProcessRestartSocketClient:
        os.environ["LOCAL_RANK"] = str(local_rank)
        made = await asyncio.to_thread(InProcessRestartSocketClient)
        self.clients.append(made)
        return made

    async def checkpoints(self, local_rank: int = 0) -> CheckpointDiscoverySocketClient:
        os.environ["LOCAL_RANK"] = str(local_rank)
        made = await asyncio.to_thread(CheckpointDiscoverySocketClient, "run", NPROC)
        self.clients.append(made)
        return made

    def begin(self, restarts: int = 0, *, is_fresh: bool = False, **fields: Any) -> None:
        start = StartRequest(
            rank=1, nnodes=3, fault_count=restarts, master_addr="10.0.0.1", master_port=29500, **fields
        )
        self.coordinator.begin_run(start, progress=start.progress, is_fresh=is_fresh)

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + PATIENCE_S
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, "waited in vain"
            await asyncio.sleep(0.002)

    async def at_barrier(self, local_rank: int = 0) -> None:
        await self.until(lambda: self.coordinator.position(local_rank) is RankPosition.AT_BARRIER)


async def ask(pod: Pod, **call: Any) -> dict[str, Any]:
    """Make one call by hand, on a connection of its own."""
    reader, writer = await asyncio.open_unix_connection(str(pod.server.path))
    try:
        writer.write(json.dumps({"v": PROTOCOL, "local_rank": 0, **call}).encode() + b"\n")
        answer = json.loads(await asyncio.wait_for(reader.readline(), PATIENCE_S))
        assert isinstance(answer, dict)
        return answer
    finally:
        writer.close()
        await writer.wait_closed()
