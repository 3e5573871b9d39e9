"""The quick end of a worker: everything that belongs to its program is torn down as usual, what was preloaded is not.

Tearing down torch takes most of a normal exit, and serves nothing. The interpreter clears modules from the last imported to
the first, so a module that stands between what the server imported and what the worker imported is cleared when all of
the worker's own is: threads have been joined, exit handlers run, files closed, objects finalized. Its last word is the
process's. Should an interpreter do it in another order, the module does nothing, and the exit is the normal, slow one.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import os
import signal
import stat
import sys
import threading
import weakref
from contextlib import suppress
from types import ModuleType
from typing import Any

from elastipod_agent.fork_server.program import INTERRUPTED
from elastipod_agent.workers.linux import die_by_signal, flush_c_streams

_SENTINEL = "_elastipod_exit_sentinel"
_FLUSH_LIMIT_S = 1.0
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class _ExitSentinel:
    """Ends the process when it is thrown away. All that it then needs stands in its arguments: modules are empty by then."""

    def __init__(self) -> None:
        self.code: int | None = None

    def __del__(
        self,
        leave: Any = os._exit,
        flush: Any = flush_c_streams,
        interrupt: Any = die_by_signal,
        interrupted: int = INTERRUPTED,
        number: int = int(signal.SIGINT),
    ) -> None:
        if self.code is None:
            return
        flush()
        if self.code == interrupted:
            interrupt(number)
        leave(self.code & 0xFF)


def install_exit_sentinel() -> None:
    """Set the fence after all that has been imported so far, and let nothing of that stand in the way of a quick end."""
    for finalizer in list(getattr(weakref.finalize, "_registry", {})):
        finalizer.atexit = False  # they put things in order within a process that is about to end, one by one
    module: Any = ModuleType(_SENTINEL)
    module.sentinel = _ExitSentinel()
    ctypes.pythonapi.Py_IncRef(
        ctypes.py_object(module)
    )  # kept, so that it is cleared in its turn and not thrown away early
    sys.modules[_SENTINEL] = module


def flush_files_at_exit() -> None:
    """In a worker, before its program runs: have its files written out at the end whatever happens to their owners."""
    atexit.register(_flush)


def exit_process(code: int) -> None:
    """End the process with this code, or INTERRUPTED. Does not return."""
    module: Any = sys.modules.get(_SENTINEL)
    if module is not None and can_flush_c_streams(_FLUSH_LIMIT_S):
        module.sentinel.code = code
    raise SystemExit(130 if code == INTERRUPTED else code)


def _flush() -> None:
    """After all exit handlers of the program: write out files that are still open, also those that only a thread holds.

    Plain files alone: a pipe or a socket may wait for ever for a reader.
    """
    for item in gc.get_objects():
        if issubclass(type(item), _BUFFERED):  # isinstance() would ask the object, which may be anything
            with suppress(Exception):
                if not item.closed and stat.S_ISREG(os.fstat(item.fileno()).st_mode):
                    item.flush()
    module: Any = sys.modules.get(_SENTINEL)
    if module is None:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except Exception:  # the interpreter's own exit does what it can, and says in its code what it could not
        module.sentinel.code = None


def can_flush_c_streams(limit_s: float) -> bool:
    """Flush C's streams; False when a thread uses one and does not let it go, so that it must not be waited for."""
    flusher = threading.Thread(target=flush_c_streams, name="flush", daemon=True)
    try:
        flusher.start()
    except RuntimeError:  # no more threads are allowed
        return False
    flusher.join(limit_s)
    return not flusher.is_alive()
