"""Fast exit of a worker: its own program is torn down as usual, the preloaded modules are not.

Tearing down torch takes most of the time of a normal exit and has no use. The interpreter clears modules in reverse order of import. A
sentinel module between the imports of the server and those of the worker is therefore cleared when everything of the worker is done:
threads joined, exit handlers run, files closed, objects finalized. The sentinel then ends the process. If an interpreter used another
order, the sentinel would do nothing and the exit would be the normal, slow one.
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
from typing import Any, NoReturn

from elastipod.uncaught import note_exit_status
from elastipod_agent.fork_server.program import INTERRUPTED
from elastipod_agent.workers.linux import die_by_signal, flush_c_streams

_SENTINEL = "_elastipod_exit_sentinel"
_FLUSH_LIMIT_S = 1.0
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class _ExitSentinel:
    """Ends the process when it is deleted. The defaults of the arguments hold all that it needs, because modules are empty by then."""

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
    """Put the sentinel after everything that is imported so far, and disable finalizers of those modules."""
    for finalizer in list(getattr(weakref.finalize, "_registry", {})):
        finalizer.atexit = False  # they would clean up one by one in a process that is about to end
    module: Any = ModuleType(_SENTINEL)
    module.sentinel = _ExitSentinel()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))  # keeps the module until it is cleared in its turn
    sys.modules[_SENTINEL] = module


def flush_files_at_exit() -> None:
    """In a worker, before its program runs: register a flush of its open files at exit."""
    atexit.register(_flush)


def exit_process(code: int) -> NoReturn:
    """Exit with this code, or as by SIGINT for INTERRUPTED. Does not return."""
    module: Any = sys.modules.get(_SENTINEL)
    if module is not None and can_flush_c_streams(_FLUSH_LIMIT_S):
        module.sentinel.code = code
    status = 130 if code == INTERRUPTED else code
    note_exit_status(status)
    raise SystemExit(status)


def _flush() -> None:
    """Flush files that are still open after all exit handlers of the program, also those that only a thread holds.

    Regular files only: a pipe or a socket may wait for a reader without end.
    """
    for item in gc.get_objects():
        if issubclass(type(item), _BUFFERED):  # isinstance() would run code of the object, which may be anything
            with suppress(Exception):
                if not item.closed and stat.S_ISREG(os.fstat(item.fileno()).st_mode):
                    item.flush()
    module: Any = sys.modules.get(_SENTINEL)
    if module is None:
        return
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except Exception:  # the normal exit does what it can and shows in its code what it could not
        module.sentinel.code = None


def can_flush_c_streams(limit_s: float) -> bool:
    """Flush C's streams; False if a thread holds one of them for longer than the limit."""
    flusher = threading.Thread(target=flush_c_streams, name="flush", daemon=True)
    try:
        flusher.start()
    except RuntimeError:  # no more threads are allowed
        return False
    flusher.join(limit_s)
    return not flusher.is_alive()
