"""What a job does, seen from this machine alone: its processes and its sample logs. Works while no API server answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastipod_local.processes import ProcessId


def training_processes(job: str) -> dict[str, frozenset[ProcessId]]:
    """Give the training processes of a job of namespace default by pod; a process that took over a pid is another one."""
    found: dict[str, set[ProcessId]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        environment = _environment(pid)
        if environment.get("ELASTIPOD_JOB") != f"default/{job}" or "LOCAL_RANK" not in environment:
            continue
        if process := ProcessId.of(pid):
            found.setdefault(environment["ELASTIPOD_POD"], set()).add(process)
    return {pod: frozenset(processes) for pod, processes in found.items()}


def workers_of_pod(uid: str) -> list[int]:
    """Give the training processes of a pod, whoever's agent started them, by their pids on this machine."""
    pids = map(int, filter(str.isdigit, os.listdir("/proc")))
    return [pid for pid in pids if "LOCAL_RANK" in _environment(pid) and uid in _control_groups(pid)]


def _control_groups(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""


def _environment(pid: int) -> dict[str, str]:
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in raw.decode(errors="replace").split("\0") if "=" in entry)


@dataclass
class Generation:
    """One generation as its workers logged it. began, ended: Unix times of the first start and of the last line."""

    number: int
    resumed_step: int
    world_size: int
    began: float
    ended: float
    steps: dict[int, float] = field(default_factory=dict)
    """When rank 0 completed each step."""


def generations(samples: Path) -> list[Generation]:
    """Read the sample logs of a job that may be training still, oldest generation first."""
    found: dict[int, Generation] = {}
    for path in sorted(samples.glob("gen-*-rank-*.jsonl")):
        lines = list(_lines(path))
        if not lines:
            continue
        start, times = lines[0], [line["t"] for line in lines if "t" in line]
        fresh = Generation(start["generation"], start["resumed_step"], start["world_size"], times[0], times[-1])
        known = found.setdefault(fresh.number, fresh)
        known.began, known.ended = min(known.began, times[0]), max(known.ended, times[-1])
        if start["rank"] == 0:
            known.steps = {line["step"]: line["t"] for line in lines if line["kind"] == "step"}
    return [found[number] for number in sorted(found)]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        if line.endswith("}"):  # the last one may be cut short by the end of its worker
            yield json.loads(line)


def steps_between(samples: Path, begin: float, end: float) -> int:
    """Count the steps that were completed in a span of Unix times, over all generations."""
    return sum(begin <= at < end for generation in generations(samples) for at in generation.steps.values())


def overlaps(samples: Path) -> list[str]:
    """Say which generations trained at the same time; none may, for the later one does not know of the earlier's steps."""
    return [
        f"generation {later.number} began {earlier.ended - later.began:.3f} s before {earlier.number} ended"
        for earlier, later in pairwise(generations(samples))
        if later.began < earlier.ended
    ]
