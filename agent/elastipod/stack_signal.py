"""Stack dumps on demand: the worker writes the stacks of its threads to a file when the agent sends a signal.

Python's faulthandler writes them inside the signal handler, without the GIL, so it also works for a worker that hangs in C
code. It costs nothing until the signal arrives. The signal is the highest real-time signal that this process neither handles,
ignores nor blocks. The first line of the file holds the PID of the process that writes, which differs from the one that the
agent started when the script runs behind a shell.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Collection
from contextlib import suppress

from elastipod.worker_file import WorkerFile

_STATUS = "/proc/self/status"
_registered: tuple[int, int] | None = None  # the signal and the open file of this process


def enable_stack_signal(worker_file: WorkerFile, local_rank: int) -> None:
    """Let the agent request stack dumps of this process. Does nothing where no file or signal is available."""
    global _registered
    disable_stack_signal()
    with suppress(OSError, RuntimeError, ValueError):
        number = free_signal(_used_signals())
        path = worker_file.stacks_path(local_rank)
        with suppress(FileNotFoundError):
            os.unlink(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(descriptor, f"pid {os.getpid()}\n".encode())
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        _registered = (number, descriptor)
        worker_file.set_stacks_signal(local_rank, number)


def disable_stack_signal() -> None:
    """Stop answering requests. A process has one registration at a time."""
    global _registered
    if _registered is not None:
        number, descriptor = _registered
        _registered = None
        faulthandler.unregister(number)
        os.close(descriptor)


def free_signal(used: Collection[int]) -> int:
    """Give the highest real-time signal that is not in use; libc uses the lowest. Raises ValueError when none is free."""
    return max(set(range(signal.SIGRTMIN + 1, signal.SIGRTMAX + 1)).difference(used))


def _used_signals() -> set[int]:
    """Give the signals that this process blocks, ignores or handles, including handlers of C code. Raises OSError."""
    used = 0
    with open(_STATUS, encoding="ascii") as lines:
        for line in lines:
            if line.startswith(("SigBlk:", "SigIgn:", "SigCgt:")):
                used |= int(line.split()[1], 16)
    return {number for number in range(1, 65) if used >> (number - 1) & 1}
