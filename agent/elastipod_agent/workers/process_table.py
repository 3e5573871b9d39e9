"""Reads the state of processes from /proc."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Process:
    """One process as /proc shows it."""

    pid: int
    parent: int
    session: int
    is_dead: bool  # only its exit status is left


_NUM_THREADS = 17  # its place among the fields of /proc/PID/stat behind the name
_ENVIRONMENT = slice(47, 49)  # where it begins and ends
_LONGEST_STAT = 4096  # bytes; one has some fifty numbers and a short name


def snapshot(proc: Path = PROC) -> dict[int, Process]:
    """List all processes by pid. The list is not atomic: processes come and go meanwhile."""
    found: dict[int, Process] = {}
    for entry in os.listdir(proc):
        if not entry.isdigit():
            continue
        with suppress(OSError):  # it has ended meanwhile
            fields = _read_at_once(f"{proc}/{entry}/stat").rpartition(b")")[2].split()
            # A main thread that has ended is a zombie too, while other threads live and hold what the process holds.
            is_dead = fields[0] in (b"Z", b"X") and int(fields[_NUM_THREADS]) <= 1
            found[int(entry)] = Process(int(entry), int(fields[1]), int(fields[3]), is_dead)
    return found


def descendants(processes: dict[int, Process], ancestor: int) -> list[Process]:
    """Give all processes below ``ancestor``."""
    children: dict[int, list[Process]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [ancestor]
    while waiting:
        below = children.pop(waiting.pop(), [])
        found.extend(below)
        waiting.extend(process.pid for process in below)
    return found


def living_below(ancestor: int, pids: Collection[int]) -> tuple[int, ...]:
    """Give those of the pids that are living processes below ``ancestor``."""
    if not pids:
        return ()
    return tuple(one.pid for one in descendants(snapshot(), ancestor) if one.pid in pids and not one.is_dead)


def name_of(pid: int, proc: Path = PROC) -> bytes:
    """Give a process's name, at most 15 bytes; b"" if it is gone. Unlike its arguments it is not in its memory: reading never blocks."""
    return _read(proc / str(pid) / "comm").removesuffix(b"\n")


def command_line(pid: int, proc: Path = PROC) -> bytes:
    """Give a process's arguments, each ended by a zero byte; b"" if it is gone."""
    return _read(proc / str(pid) / "cmdline")


def catches(pid: int, number: int, proc: Path = PROC) -> bool:
    """Tell whether a process has a handler for a signal; False if it is gone."""
    for line in _read(proc / str(pid) / "status").splitlines():
        name, _, mask = line.partition(b":")
        if name == b"SigCgt":
            return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def uses_device(pid: int, proc: Path = PROC) -> bool:
    """Tell whether a process has an accelerator open."""
    try:
        files = list((proc / f"{pid}/fd").iterdir())
    except OSError:
        return False
    for file in files:
        with suppress(OSError):
            if os.readlink(file).startswith(("/dev/nvidia", "/dev/kfd", "/dev/neuron")):
                return True
    return False


def is_stopped(pid: int, proc: Path = PROC) -> bool:
    """Tell whether the process is stopped by a signal."""
    return _read(proc / str(pid) / "stat").rpartition(b")")[2].split()[:1] in ([b"T"], [b"t"])


def has_in_environment(pid: int, entry: str, proc: Path = PROC) -> bool | None:
    """Tell whether the initial environment of a process holds ``NAME=value``; None if it is in the middle of an exec.

    The kernel maps the new program before it notes where its environment is: until then it reads as empty.
    """
    if environment := _read(proc / str(pid) / "environ"):
        return os.fsencode(entry) in environment.split(b"\0")
    return False if _has_no_environment(pid, proc) else None


def _has_no_environment(pid: int, proc: Path) -> bool:
    try:
        os.readlink(proc / str(pid) / "exe")
        begin, end = _read_at_once(f"{proc}/{pid}/stat").rpartition(b")")[2].split()[_ENVIRONMENT]
    except OSError:  # it has ended, or is another user's
        return True
    return begin == end != b"0"


def _read_at_once(path: str) -> bytes:
    """Read a short file with as little work as possible: a host may run many processes. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _LONGEST_STAT)
    finally:
        os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # gone, or another user's
        return b""
