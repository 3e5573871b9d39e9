"""The pods of a job with in-process restart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.agent_client import until
from tests.e2e.agent_process import AgentProcess
from tests.free_ports import free_port


class Pods:
    """Agents of one job, and what their ranks printed about runs."""

    def __init__(self, folder: Path, agents: list[AgentProcess], nproc: int) -> None:
        self.folder = folder
        self.agents = agents
        self.nproc = nproc

    def start(self, generation: int, **fields: Any) -> None:
        """Start all pods, and wait until all ranks are in the run."""
        port = free_port()
        for rank, agent in enumerate(self.agents):
            assert agent.start(generation, rank=rank, nnodes=len(self.agents), master_port=port, **fields) == (
                200,
                None,
            )
        until(lambda: len(self.pids(generation)) == self.nproc * len(self.agents), f"all ranks in run {generation}")

    def stop(self, generation: int, **fields: Any) -> None:
        """Stop all pods and wait until they are ready."""
        for agent in self.agents:
            assert agent.stop(generation, **fields) == (200, None)
        for agent in self.agents:
            agent.until("ready")

    def pids(self, generation: int) -> dict[int, int]:
        """Give which process was which rank in a run."""
        lines = re.findall(rf"run {generation} restarts .* rank (\d+) .* pid (\d+)", self.printed())
        return {int(rank): int(pid) for rank, pid in lines}

    def printed(self) -> str:
        return "".join(agent.printed() for agent in self.agents)

    def order(self, rank: int, todo: str) -> None:
        (self.folder / f"order-{rank}.new").write_text(todo)
        (self.folder / f"order-{rank}.new").rename(self.folder / f"order-{rank}")
