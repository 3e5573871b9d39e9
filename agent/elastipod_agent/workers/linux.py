"""The process settings of Linux that Python does not offer by itself."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # glibc has a function for it only since 2.41
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # struct sched_attr of sched_setattr(2), as long as its first version
_RESET_ON_FORK = 1
_SHORTEST_SLICE_NS = 100_000
_libc = ctypes.CDLL(None, use_errno=True)
_strstr = ctypes.PyDLL(None).strstr  # keeps the interpreter locked: a call is short
_strstr.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_strstr.restype = ctypes.c_void_p


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends, as PID 1 is. Raises OSError."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def request_short_time_slices() -> None:
    """Ask for short slices of processor time, so that a wake-up is not kept waiting for the slices of busy workers.

    No right is needed and nobody gets less: the share of the processor stays. Children begin with the usual slices.
    Kernels before 6.12 know nothing of it and change nothing.
    """
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attr = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, _SHORTEST_SLICE_NS, 0, 0)
    _libc.syscall(number, 0, attr, 0)


def die_with_parent(parent: int) -> None:
    """To be called in a child between fork and exec: the kernel kills it when the thread that made it ends.

    So an agent that is itself killed leaves no worker behind that would hold an accelerator and a rank.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def process_memory(kind: str) -> tuple[int, int]:
    """Give where this process's command line ("arg") or first environment ("env") stands in its memory: begin and end."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    first = {"arg": 45, "env": 47}[kind]  # fields 48 to 51 of proc(5), counted from the state, the third
    return int(fields[first]), int(fields[first + 1])


def overwrite_memory(begin: int, data: bytes) -> None:
    """Put bytes at an address of this process; it must be one that `process_memory` gave, with so much room."""
    ctypes.memmove(begin, data, len(data))


def read_memory(begin: int, end: int) -> bytes:
    """Read bytes at an address of this process; as for `overwrite_memory`."""
    return ctypes.string_at(begin, end - begin)


def flush_c_streams() -> None:
    """Write out what C code has left in its buffers; waits for a thread that is just using one."""
    _libc.fflush(None)


def die_by_signal(number: int) -> None:
    """End this process as the signal's default action would. To be called with nothing else left to do."""
    _libc.signal(number, 0)
    _libc.kill(os.getpid(), number)


def keep_freed_memory(num_bytes: int) -> None:
    """Let the allocator keep so much of what is freed, instead of giving it back and asking anew; glibc only."""
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(-1, num_bytes)  # M_TRIM_THRESHOLD
        mallopt(-3, num_bytes)  # M_MMAP_THRESHOLD


def fast_find(data: bytes) -> Callable[[bytes, int], int]:
    """Give ``data.find`` for texts of UTF-8, from the C library: there it is ten to thirty times as fast on log lines."""
    # strstr ends at a zero byte, which every bytes object has behind its last; 0xff is in no text of UTF-8
    searched = data.replace(b"\0", b"\xff") if b"\0" in data else data
    begin = ctypes.cast(ctypes.c_char_p(searched), ctypes.c_void_p).value or 0

    def find(text: bytes, at: int) -> int:
        if b"\0" in text:
            return data.find(text, at)
        found: int | None = _strstr(begin + at, text)
        return -1 if found is None else found - begin

    find.data = searched  # type: ignore[attr-defined]  # lives as long as its address is used
    return find
