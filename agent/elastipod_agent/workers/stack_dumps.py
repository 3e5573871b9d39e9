"""Requests the stacks of workers that offer them (see `elastipod.stack_signal`); of others it gives what the kernel shows."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from elastipod.worker_file import WorkerFile
from elastipod_agent.workers.process_table import PROC, descendants, is_stopped, snapshot

PATIENCE_S = 2.0
MAX_STACKS_BYTES = 64 * 1024
_POLL_S = 0.02
_QUIET_POLLS = 8  # a file that has not grown for this many polls is complete
_MAX_KERNEL_FRAMES = 8


@dataclass(frozen=True, slots=True)
class StackDump:
    """The stacks of one worker; if there are none, stacks is "" and facts is a sentence. is_unresponsive: it was asked
    for them, or is stopped.
    """

    stacks: str = ""
    facts: str = ""
    is_unresponsive: bool = False


@dataclass(slots=True)
class _StackRequest:
    path: str
    begin: int  # bytes that were in the file before
    size: int
    num_quiet: int = 0

    def is_complete(self) -> bool:
        """Poll; True if the worker has written its stacks and the file has stopped growing."""
        size = _size(self.path)
        self.num_quiet = self.num_quiet + 1 if size == self.size > self.begin else 0
        self.size = size
        return self.num_quiet >= _QUIET_POLLS


async def request_stacks(
    page: WorkerFile, pids: Mapping[int, int], patience_s: float = PATIENCE_S
) -> dict[int, StackDump]:
    """Request the stacks of all workers at once; gives them by local rank. pids: of the living workers, by local rank."""
    ours = {process.pid for process in descendants(snapshot(), os.getpid())}
    stopped = {rank for rank, pid in pids.items() if is_stopped(pid)}  # which write nothing
    requests = {rank: found for rank in pids.keys() - stopped if (found := _send_request(page, rank, ours)) is not None}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    waiting = dict(requests)
    while waiting and loop.time() < deadline:
        await asyncio.sleep(_POLL_S)
        waiting = {rank: one for rank, one in waiting.items() if not one.is_complete()}
    answers: dict[int, StackDump] = {}
    for rank, pid in pids.items():
        stacks = _read(requests[rank].path, requests[rank].begin) if rank in requests else ""
        if stacks:
            answers[rank] = StackDump(stacks=stacks)
        else:
            why = f"did not write its stacks within {patience_s:g} s" if rank in requests else "offers no stacks"
            why = "is stopped" if rank in stopped else why
            is_unresponsive = rank in requests or rank in stopped
            answers[rank] = StackDump(facts=f"{why}; {kernel_facts(pid)}", is_unresponsive=is_unresponsive)
    return answers


def kernel_facts(pid: int, proc: Path = PROC) -> str:
    """Describe a process as the kernel shows it: its state, and where in the kernel it waits."""
    status = dict(line.split(":", 1) for line in _text(proc / f"{pid}/status").splitlines() if ":" in line)
    if not status:
        return f"process {pid} is gone"
    said = f"process {pid} is in state {status.get('State', '?').strip()} with {status.get('Threads', '?').strip()} threads"
    place = _text(proc / f"{pid}/wchan").strip()
    if place not in ("", "0"):
        said += f", waiting in {place}"
    frames = [line.split()[-1].partition("+")[0] for line in _text(proc / f"{pid}/stack").splitlines() if line.split()]
    if frames:
        said += f" (kernel stack: {', '.join(frames[:_MAX_KERNEL_FRAMES])})"
    return said


def _send_request(page: WorkerFile, local_rank: int, ours: Collection[int]) -> _StackRequest | None:
    """Send the signal, but only to a descendant that handles it: it would kill any other process."""
    number = page.stacks_signal(local_rank)
    path = page.stacks_path(local_rank)
    first_line = _read(path, 0).partition("\n")[0].split()
    if not number or len(first_line) != 2 or not first_line[1].isdecimal():
        return None
    pid = int(first_line[1])
    if pid not in ours or not _handles(pid, number):
        return None
    size = _size(path)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        return _StackRequest(path, size, size)
    return None


def _handles(pid: int, number: int) -> bool:
    for line in _text(PROC / f"{pid}/status").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _size(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


def _read(path: str, begin: int) -> str:
    """Read a bounded part of a worker's file; "" if it is not a regular file, because the workers own the directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return ""
        return os.pread(descriptor, MAX_STACKS_BYTES, begin).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
