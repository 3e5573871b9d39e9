"""Process settings of Linux that Python's standard library lacks."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # glibc has a function for it since 2.41
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # struct sched_attr of sched_setattr(2), with the size of its first version
_RESET_ON_FORK = 1
_SHORTEST_SLICE_NS = 100_000
_libc = ctypes.CDLL(None, use_errno=True)
_strstr = ctypes.PyDLL(None).strstr  # holds the GIL: a call is short
_strstr.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_strstr.restype = ctypes.c_void_p


def adopt_orphans() -> None:
    """Make this process a subreaper: the parent of descendants whose own parent ends, like PID 1. Raises OSError."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def request_short_time_slices() -> None:
    """Request short scheduler time slices, so that a wake-up does not wait for the slices of busy workers.

    This needs no privilege and does not change how much CPU time any process gets. Children have the default slices. Kernels before 6.12
    ignore it.
    """
    number = _SYS_SCHED_SETATTR.get(os.uname().machine)
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attr = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, _SHORTEST_SLICE_NS, 0, 0)
    _libc.syscall(number, 0, attr, 0)


def allow_descriptors(number: int) -> bool:
    """Let this process have so many files and connections open; whether it may, which its hard limit decides.

    Workers that are started from it later inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most == number


def die_with_parent(parent: int) -> None:
    """Call in a child between fork and exec: the kernel kills the child when the thread that forked it ends.

    An agent that is killed therefore leaves no worker behind that would hold an accelerator and a rank.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(1)


def process_memory(kind: str) -> tuple[int, int]:
    """Give the begin and end address of this process's command line ("arg") or initial environment ("env")."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    first = {"arg": 45, "env": 47}[kind]  # fields 48 to 51 of proc(5), counted from the state, the third
    return int(fields[first]), int(fields[first + 1])


def overwrite_memory(begin: int, data: bytes) -> None:
    """Write bytes to an address range of this process that `process_memory` gave."""
    ctypes.memmove(begin, data, len(data))


def read_memory(begin: int, end: int) -> bytes:
    """Read bytes from an address range of this process that `process_memory` gave."""
    return ctypes.string_at(begin, end - begin)


def flush_c_streams() -> None:
    """Flush the buffers of C code; waits for a thread that is using one."""
    _libc.fflush(None)


def die_by_signal(number: int) -> None:
    """End this process by the signal's default action."""
    _libc.signal(number, 0)
    _libc.kill(os.getpid(), number)


def fast_find(data: bytes) -> Callable[[bytes, int], int]:
    """Give ``data.find`` for UTF-8 texts, implemented by the C library: ten to thirty times as fast on log lines."""
    # strstr ends at a zero byte, which follows every bytes object; 0xff occurs in no UTF-8 text
    searched = data.replace(b"\0", b"\xff") if b"\0" in data else data
    begin = ctypes.cast(ctypes.c_char_p(searched), ctypes.c_void_p).value or 0

    def find(text: bytes, at: int) -> int:
        if b"\0" in text:
            return data.find(text, at)
        found: int | None = _strstr(begin + at, text)
        return -1 if found is None else found - begin

    find.data = searched  # type: ignore[attr-defined]  # keeps the data alive as long as its address is used
    return find
