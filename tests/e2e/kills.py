"""Any process of a cluster and of the job on it, found from this machine, and what its death did to the training."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
from tests.e2e.host_view import training_processes

from elastipod_local.cluster import Cluster
from elastipod_local.controlplane import KUEUE

LOG_NAME = re.compile(r"gen-(\d+)-rank-(\d+)\.jsonl")
TAIL_BYTES = 4096


class Victim(StrEnum):
    """What is killed."""

    OPERATOR = "operator"
    API_SERVER = "API server"
    ETCD = "etcd"
    KUBELET = "kubelet"
    CONTAINERD = "containerd"
    SCHEDULER = "kube-scheduler"
    CONTROLLER_MANAGER = "kube-controller-manager"
    KUEUE = "Kueue"
    FORK_SERVER = "fork server"
    WORKER = "worker"
    WORKER_0 = "worker of rank 0"
    AGENT = "agent"
    AGENT_0 = "agent of rank 0"

    @property
    def trains(self) -> bool:
        """Whether a rank dies with it."""
        return self in (Victim.WORKER, Victim.WORKER_0, Victim.AGENT, Victim.AGENT_0)


# How often each is drawn, of twenty-five kills.
SHARES = {
    Victim.OPERATOR: 3, Victim.API_SERVER: 3, Victim.ETCD: 1, Victim.KUBELET: 3, Victim.CONTAINERD: 1,
    Victim.SCHEDULER: 1, Victim.CONTROLLER_MANAGER: 1, Victim.KUEUE: 1, Victim.FORK_SERVER: 2,
    Victim.WORKER: 3, Victim.WORKER_0: 2, Victim.AGENT: 2, Victim.AGENT_0: 2,
}  # fmt: skip
# Processes of the control plane, in the order in which they are started again: nothing else is ready without the first two.
ROLES = {
    Victim.ETCD: "etcd", Victim.API_SERVER: "kube-apiserver", Victim.SCHEDULER: "kube-scheduler",
    Victim.CONTROLLER_MANAGER: "kube-controller-manager", Victim.KUEUE: KUEUE,
}  # fmt: skip


def shares_of(names: str) -> dict[Victim, int]:
    """Give how often each victim is drawn: all of them, or those that are named, separated by commas. Raises ValueError."""
    chosen = {Victim(name.strip()) for name in names.split(",") if name.strip()}
    return {victim: share for victim, share in SHARES.items() if not chosen or victim in chosen}


@dataclass(frozen=True, slots=True)
class Rank:
    """A living rank of the newest generation. pid: on this machine."""

    rank: int
    pod: str
    pid: int


def living_ranks(job: str) -> list[Rank]:
    """Give the ranks whose processes have the log of the newest generation open."""
    found: dict[int, list[Rank]] = {}
    for pod, processes in training_processes(job).items():
        for process in processes:
            for generation, rank in _open_logs(process.pid):
                found.setdefault(generation, []).append(Rank(rank, pod, process.pid))
    return sorted(found[max(found)], key=lambda each: each.rank) if found else []


def _open_logs(pid: int) -> Iterator[tuple[int, int]]:
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if match := LOG_NAME.search(str(entry.readlink())):
                    yield int(match[1]), int(match[2])


def generation_of(pid: int) -> int:
    """Give the generation that a worker trains in; 0 for one that has not begun or has just ended."""
    return max((generation for generation, _ in _open_logs(pid)), default=0)


def agent_of(pid: int) -> int | None:
    """Give the agent above a worker; None when the worker has just ended."""
    with suppress(psutil.Error):
        for above in psutil.Process(pid).parents():
            line = " ".join(above.cmdline())
            if "hyperpodrun" in line and "fork_server" not in line:
                return above.pid
    return None


def fork_servers(job: str) -> dict[int, int]:
    """Give the fork servers of a job's pods by the agents that they belong to. An agent without one is left out."""
    workers = (process.pid for processes in training_processes(job).values() for process in processes)
    agents = {agent for pid in workers if (agent := agent_of(pid)) is not None}
    return {agent: servers[0].pid for agent in sorted(agents) if (servers := _of_fork_server(agent))}


def has_fork_server_since(agent: int, moment: float) -> bool:
    """Whether an agent has a fork server that began after a moment (Unix time), or has ended itself."""
    return not psutil.pid_exists(agent) or any(each.create_time() >= moment for each in _of_fork_server(agent))


def _of_fork_server(agent: int) -> list[psutil.Process]:
    """Give the fork server and, after it, what it has forked ahead, which shows the same command line until it becomes a worker."""
    found = []
    with suppress(psutil.Error):
        for child in psutil.Process(agent).children():
            with suppress(psutil.Error):
                if "fork_server/bootstrap.py" in " ".join(child.cmdline()):
                    found.append(child)
    return sorted(found, key=psutil.Process.create_time)


def kill(pid: int) -> bool:
    """Kill a process; False when it has just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def services(cluster: Cluster, name: str) -> list[int]:
    """Give the processes of one service (kubelet, containerd) on all nodes."""
    found = []
    for record in cluster.state().nodes.values():
        if record.inner is not None:
            with suppress(psutil.Error):
                children = psutil.Process(record.inner.pid).children()
                found += [child.pid for child in children if Path(child.name()).name == name]
    return sorted(found)


@dataclass(frozen=True, slots=True)
class World:
    """One generation as its logs say. began: Unix time of the first step; last_done: of the newest step that was completed."""

    generation: int
    size: int
    resumed_step: int
    num_logs: int
    began: float | None = None
    last_done: float | None = None
    newest: int = 0
    least: int = 0
    """The newest step of the rank that is behind the others."""

    def is_whole(self, size: int) -> bool:
        """Whether so many ranks train, and all have made two steps."""
        return self.size == self.num_logs == size and self.least >= self.resumed_step + 2


def newest_world(samples: Path) -> World | None:
    """Give the newest generation; None before the first."""
    names = [match for path in samples.glob("gen-*-rank-*.jsonl") if (match := LOG_NAME.fullmatch(path.name))]
    return world_of(samples, max(int(match[1]) for match in names)) if names else None


def world_of(samples: Path, generation: int) -> World:
    """Give one generation. Of long logs the beginning and the end are read."""
    logs = sorted(samples.glob(f"gen-{generation:06d}-rank-*.jsonl"))
    starts, firsts, dones, steps = [], [], [0.0], []
    for path in logs:
        head, tail = _ends_of(path)
        starts += [line for line in head if line["kind"] == "start"]
        firsts += [line["t"] for line in head if line["kind"] == "step"][:1]
        done = [line for line in (*head, *tail) if line["kind"] == "done"]
        dones += [line["t"] for line in done]
        steps.append(max((line["step"] for line in done), default=0))
    size, resumed = (starts[0]["world_size"], starts[0]["resumed_step"]) if starts else (0, 0)
    return World(
        generation, size, resumed, len(logs), min(firsts, default=None), max(dones) or None, max(steps, default=0), min(steps, default=0)
    )  # fmt: skip


def _ends_of(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    with path.open("rb") as file:
        head = file.read(TAIL_BYTES)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
    return _lines(head), _lines(tail)


def _lines(raw: bytes) -> list[dict[str, Any]]:
    """Read whole lines only: the first and the last one may be cut."""
    return [json.loads(line) for line in raw.split(b"\n") if line.startswith(b'{"kind"') and line.endswith(b"}")]


@dataclass(slots=True)
class Kill:
    """One kill. moment: what the job was doing. with_others: further kills of the same round, which share what follows.

    depths: of the changes that followed, as the history has them; gap_s: the longest time without a step; repeated: steps that
    were computed again. unscheduled_s: the longest time that a new pod waited for the scheduler, in whole seconds, most of it after the
    death of an API server: the scheduler's client backs off for up to a minute. problem: what did not hold; empty when all did.
    """

    victim: str
    moment: str
    with_others: int = 0
    generations: int = 0
    depths: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    gap_s: float = 0.0
    repeated: int = 0
    whole_s: float = 0.0
    unscheduled_s: float = 0.0
    problem: str = ""
    at: float = field(default_factory=time.time)
