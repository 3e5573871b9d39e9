"""What a benchmark says about the machine that it ran on, and the resources that processes use."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_IDLE_FIELDS = (3, 4)  # idle and iowait, in /proc/stat's line "cpu"


def describe() -> str:
    """Name the processor, its cores, the memory and the kernel."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}"


def busy_share(seconds: float) -> float:
    """Give the share of all cores that is in use, measured over this time; 1 = every core busy."""
    busy = busy_meter()
    time.sleep(seconds)
    return busy()


def busy_meter() -> Callable[[], float]:
    """Begin to watch; what is given tells the share of all cores that was used by anybody since."""
    before = _cpu_times()

    def share() -> float:
        after = _cpu_times()
        total = sum(after) - sum(before)
        idle = sum(after[field] - before[field] for field in _IDLE_FIELDS)
        return 1 - idle / total if total else 0.0

    return share


def descendants(pid: int) -> list[int]:
    """Give a process and all its descendants that are alive now, parents first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(int(entry.name))):
            children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for one in found:
        found.extend(children.get(one, ()))
    return found


def command_line(pid: int) -> str:
    """Name a process for a message: its number, and its command line while it is there."""
    try:
        return (
            f"{pid} "
            + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        )
    except OSError:
        return f"{pid} (gone)"


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of some processes in MiB: what is theirs alone, and their part of all that is shared too."""

    private_mib: float
    proportional_mib: float


def memory(pids: Iterable[int]) -> Memory:
    """Sum the memory of some processes up. Raises OSError when one is gone."""
    private = proportional = 0
    for pid in pids:
        for line in _lines(f"/proc/{pid}/smaps_rollup"):
            name, _, rest = line.partition(":")
            if name in ("Private_Clean", "Private_Dirty"):
                private += int(rest.split()[0])
            elif name == "Pss":
                proportional += int(rest.split()[0])
    return Memory(private / 1024, proportional / 1024)


def resident_mib(pid: int) -> float:
    """Give the memory of a process that is in use now, shared pages included. Raises OSError when it is gone."""
    line = next(line for line in _lines(f"/proc/{pid}/status") if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def cpu_s(pid: int) -> float:
    """Give the processor time that a process has used, all its threads together. Raises OSError when it is gone."""
    return time.clock_gettime((~pid << 3) | 2)  # the number of a process's clock, as clock_getcpuclockid(3) makes it


def _cpu_times() -> list[int]:
    return [int(field) for field in _lines("/proc/stat")[0].split()[1:9]]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0  # it has gone meanwhile


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()
