"""Stacks on demand: what a worker's threads are doing, written by the worker when its agent asks with a signal.

The interpreter's own faulthandler does it inside the signal handler, without the GIL, so it also answers for a worker
that hangs in C code. Until it is asked it costs nothing. The signal is the highest real-time one that this process
neither handles, ignores nor blocks; the first line of the file names the process that answers, which is not the one
that the agent started when a script runs behind a shell.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Collection
from contextlib import suppress

from elastipod.worker_file import WorkerFile

_STATUS = "/proc/self/status"
_offered: tuple[int, int] | None = None  # the signal and the open file of this process's last offer


def enable_stack_signal(page: WorkerFile, local_rank: int) -> None:
    """Let the agent ask this process for its stacks from now on; where that cannot be, the agent does without them."""
    global _offered
    disable_stack_signal()
    with suppress(OSError, RuntimeError, ValueError):
        number = free_signal(_used_signals())
        path = page.stacks_path(local_rank)
        with suppress(FileNotFoundError):
            os.unlink(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(descriptor, f"pid {os.getpid()}\n".encode())
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        _offered = (number, descriptor)
        page.set_stacks_signal(local_rank, number)


def disable_stack_signal() -> None:
    """Answer no more; a process has one offer at a time."""
    global _offered
    if _offered is not None:
        number, descriptor = _offered
        _offered = None
        faulthandler.unregister(number)
        os.close(descriptor)


def free_signal(used: Collection[int]) -> int:
    """Give the highest real-time signal that is not used; the lowest ones are libc's. Raises ValueError."""
    return max(set(range(signal.SIGRTMIN + 1, signal.SIGRTMAX + 1)).difference(used))


def _used_signals() -> set[int]:
    """List what this process blocks, ignores or handles, also by handlers of C code. Raises OSError."""
    used = 0
    with open(_STATUS, encoding="ascii") as lines:
        for line in lines:
            if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
                used |= int(line.split()[1], 16)
    return {number for number in range(1, 65) if used >> (number - 1) & 1}
