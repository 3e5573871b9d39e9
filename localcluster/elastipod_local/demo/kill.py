"""Killing one training worker of a pod from the machine that holds its node, as the kernel's OOM killer would."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastipod_local.errors import LocalClusterError

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker process. pid: in the namespace of this machine, not of the pod."""

    pid: int
    local_rank: int


def parse_environ(content: bytes) -> dict[str, str]:
    """Read /proc/<pid>/environ."""
    pairs = (entry.partition(b"=") for entry in content.split(b"\0") if b"=" in entry)
    return {name.decode(errors="replace"): value.decode(errors="replace") for name, _, value in pairs}


def local_rank(environ: Mapping[str, str]) -> int | None:
    """Give the local rank of a process of a pod, None when it is no worker.

    Its RANK may be another one by now, or have been unknown (-1) when it started: workers live through changes.
    """
    if "RANK" not in environ or not environ.get("LOCAL_RANK", "").isdigit():
        return None
    return int(environ["LOCAL_RANK"])


def workers_of(pod_uid: str, *, proc: Path = PROC) -> Iterator[Worker]:
    """Give the worker processes of a pod, found by the pod's control group; a worker's own children are left out."""
    found = dict(_ranked_processes(pod_uid, proc))
    for pid, rank in found.items():
        if _parent(proc / str(pid)) not in found:
            yield Worker(pid, rank)


def _ranked_processes(pod_uid: str, proc: Path) -> Iterator[tuple[int, int]]:
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if f"pod{pod_uid}" not in (entry / "cgroup").read_text():
                continue
            rank = local_rank(parse_environ((entry / "environ").read_bytes()))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        if rank is not None:
            yield int(entry.name), rank


def _parent(process: Path) -> int:
    try:
        # The second field, the command in brackets, may itself hold spaces and brackets.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def kill_worker(pod_uid: str) -> tuple[Worker, float]:
    """Kill the pod's worker with the highest local rank by SIGKILL; give it and the Unix time just before.

    Raises LocalClusterError when the pod has no worker on this machine.
    """
    workers = sorted(workers_of(pod_uid), key=lambda worker: worker.local_rank)
    if not workers:
        raise LocalClusterError(f"the pod {pod_uid} has no worker process on this machine")
    worker = workers[-1]
    handle = os.pidfd_open(worker.pid)
    try:
        # The handle is bound to this process; check once more that it is still the worker.
        if worker not in workers_of(pod_uid):
            raise LocalClusterError(f"the worker with pid {worker.pid} ended before it could be killed")
        at = time.time()
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    finally:
        os.close(handle)
    return worker, at
