"""The processes of a played job: forked workers with the environment that an agent gives them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.e2e.torch_fork_server import ForkedTestWorker, TorchForkServer

from elastipod.chaos import CHAOS_ENV, PlannedFault
from elastipod.ipc.protocol import SOCKET_ENV
from elastipod.worker_file import WORKER_FILE_ENV


@dataclass(frozen=True, slots=True)
class SlotProcesses:
    """Starts the processes of one job. racks: as for `InMemoryJob`; more: variables that all of them have."""

    servers: TorchForkServer
    folder: Path
    command: Sequence[str]
    faults: Sequence[PlannedFault]
    racks: int
    more: Mapping[str, str]

    @property
    def socket(self) -> Path:
        """Where the agents of all slots listen."""
        return self.folder / "agent.sock"

    def worker_file(self, number: int) -> Path:
        return self.folder / f"worker-file-{number}"

    def start(self, number: int, attempt: int, more: Mapping[str, str] | None = None) -> ForkedTestWorker:
        """Start the process of a slot. It has no rank: that comes from the barrier. attempt: of this slot, from 1 on."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "RANK": "-1",
            "LOCAL_RANK": "0",
            "ELASTIPOD_LOCAL_RANK": str(number),
            SOCKET_ENV: str(self.socket),
            WORKER_FILE_ENV: str(self.worker_file(number)),
            "ELASTIPOD_JOB": "tests/inmemory",
            "ELASTIPOD_FAILURE_DOMAIN": f"domain-{number % self.racks if self.racks else number}",
            CHAOS_ENV: json.dumps([asdict(fault) for fault in self.faults]),
            **self.more,
            **(more or {}),
        }
        return self.servers.start(self.command, environment, self.folder / f"output-{number}-{attempt}")


def place_in(run: int, rank: int, world_size: int, port: int) -> dict[str, str]:
    """Give the variables of a rank in a generation."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ELASTIPOD_GENERATION": str(run),
        "JOB_RESTART_COUNT": str(run - 1),
    }
