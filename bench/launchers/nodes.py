"""The launchers that are compared, each with one process per simulated node of 127.0.0.1 and one worker each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.common.processes import Failed, Process, Processes, free_port, until
from bench.launchers.client import Client
from bench.launchers.small_operator import KEEPS

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train.py")
MEMORY_SCRIPT = Path(__file__).with_name("train_in_memory.py")
SIZED_SCRIPT = Path(__file__).with_name("train_sized.py")
UP_WITHIN_S = 90.0
STORE = """
import sys, time, datetime
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, timeout=datetime.timedelta(seconds=30))
print("the store listens", flush=True)
while True:
    time.sleep(3600)
"""


@dataclass(frozen=True, slots=True)
class Launcher:
    """One side of the comparison. options: what its agent is started with beside what it always needs.

    restart_mode: what a recovery asks its agents to keep.
    """

    name: str
    python: Path
    options: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()  # of the script
    is_warm: bool = False
    is_ours: bool = False
    script: Path = SCRIPT
    restart_mode: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """One agent with a control API, and how to call it."""

    process: Process
    client: Client


class AgentNodes:
    """Starts agents with a control API: ours or the original. folder: private to one session."""

    def __init__(self, launcher: Launcher, processes: Processes, folder: Path) -> None:
        self.launcher = launcher
        self.folder = folder
        self._processes = processes

    def begin(self, number: int) -> Node:
        """Start the agent of one node; `until_ready` waits for it."""
        port = free_port()
        arguments = [
            "--server-host=127.0.0.1",
            f"--server-port={port}",
            *self.launcher.options,
            str(self.launcher.script),
            *self.launcher.arguments,
        ]
        env = worker_environment(self.folder) | {"NNODES": "1"}
        if self.launcher.is_ours:
            command = [str(self.launcher.python), "-m", "elastipod_agent", *arguments]
            env |= {"PYTHONPATH": str(REPOSITORY / "agent"), "KUBERNETES_SERVICE_HOST": "127.0.0.1"}
            env |= {"ELASTIPOD_JOB": "bench/agent", "ELASTIPOD_POD": f"node-{number}"}
            env |= {
                "ELASTIPOD_FAILURE_DOMAIN": f"node-{number}"
            }  # else no copy of a shard is made: all share this host
        else:
            command = [str(self.launcher.python.with_name("hyperpodrun")), "--nproc-per-node=1", *arguments]
            env |= {"HYPERPOD_SIGNAL_COORDINATION": "distributed"}  # else each rank stops after a step of its own
        process = self._processes.start(f"node {number}", command, env, self.folder / f"node-{number}.txt")
        return Node(process, Client(port))

    def until_ready(self, node: Node) -> None:
        """Wait until the agent takes a /start. Raises Failed."""

        def ready() -> bool:
            node.process.require_alive()
            try:
                return bool(node.client.status()["status"] == "ready")
            except OSError:
                return False

        until(ready, f"{node.process.name} to be READY", UP_WITHIN_S, seen=node.process.printed_last)


class TorchrunNodes:
    """Starts torchrun agents around a rendezvous store.

    own_store: the store has a process of its own, so that no node's loss takes it away; else the first node hosts it.
    """

    def __init__(
        self, launcher: Launcher, processes: Processes, folder: Path, sizes: str, *, own_store: bool = True
    ) -> None:
        self.launcher = launcher
        self.folder = folder
        self._processes = processes
        self._sizes = sizes
        self._port = free_port()
        if own_store:
            command = [str(launcher.python), "-c", STORE, str(self._port)]
            store = processes.start("store", command, worker_environment(folder), folder / "store.txt")
            until(lambda: "listens" in store.printed_last(), "the store", UP_WITHIN_S, seen=store.printed_last)

    def begin(self, number: int) -> Process:
        """Start the agent of one node."""
        command = [
            *(
                str(self.launcher.python),
                "-m",
                "torch.distributed.run",
                f"--nnodes={self._sizes}",
                "--nproc-per-node=1",
            ),
            *(
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{self._port}",
                "--rdzv-id=bench",
                "--max-restarts=100",
            ),
            *(*self.launcher.options, str(SCRIPT)),
        ]
        env = worker_environment(self.folder) | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return self._processes.start(f"node {number}", command, env, self.folder / f"node-{number}.txt")


def worker_environment(folder: Path) -> dict[str, str]:
    """Give what agents, and so their workers, are started with, whatever their make."""
    kept: Mapping[str, str] = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    own = {"HOME": str(folder), "BENCH_FOLDER": str(folder), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return {**kept, **own, "GLOO_SOCKET_IFNAME": "lo"}


def sized(plain: Path, megabytes: float, kind: str = "ddp") -> Launcher:
    """Give our agent with a training that keeps a state of this size in memory. kind: as train_sized.py knows them."""
    script = {"script": SIZED_SCRIPT, "arguments": (f"{megabytes:g}", kind)}
    name = f"{megabytes:g} MB" if kind == "ddp" else kind
    return Launcher(name, plain, is_warm=True, is_ours=True, restart_mode=KEEPS, **script)  # type: ignore[arg-type]


def launchers(plain: Path, original: Path) -> dict[str, Launcher]:
    """Give all sides by name. plain: a Python with torch and no agent; original: one with the original agent.

    torchrun-tuned: waits one second for latecomers and notices a silent node after three keep-alives of a
    second (with two it takes living nodes for dead: a keep-alive may come late by its whole interval).
    """
    for python in (plain, original):
        if not python.exists():
            raise Failed(f"there is no {python}")
    tuned = "--rdzv-conf=is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
    sides = (
        Launcher("warm", plain, is_warm=True, is_ours=True),
        Launcher("memory", plain, is_warm=True, is_ours=True, script=MEMORY_SCRIPT, restart_mode=KEEPS),
        Launcher("cold", plain, ("--no-warm-workers",), is_ours=True),
        Launcher("original", original),
        Launcher("torchrun-tuned", plain, (tuned,)),
        Launcher("torchrun", plain),
    )
    return {side.name: side for side in sides}
