"""The end of a process while a save is in progress.

A process that exits in order waits for its saves. One that failed does not: its agent learns of a failure by the end of the
process, and a save may take minutes. The draft of such a save is invisible, and the next generation deletes it. A process
that exits in a drain with a deadline abandons the save once memory holds the step.
"""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import signal
import stat
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, Protocol

from elastipod.uncaught import exit_status, uncaught_exception

_ABANDON_S = 1.0  # for a save to notice that it was abandoned
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class PendingSave(Protocol):
    """A save in progress."""

    thread: threading.Thread
    is_abandoned: bool

    def await_end(self) -> None: ...


_pending_saves: weakref.WeakSet[Any] = weakref.WeakSet()


def wait_at_exit(save: PendingSave) -> None:
    """Have the process wait for a save when it exits, unless the process failed or the save was abandoned."""
    _pending_saves.add(save)


def _at_exit() -> None:
    failure = uncaught_exception()
    for save in list(_pending_saves):
        if failure is None and not save.is_abandoned:
            save.await_end()
    saves = [save for save in _pending_saves if save.thread.is_alive()]
    for save in saves:
        save.is_abandoned = True
    deadline = time.monotonic() + _ABANDON_S
    for save in saves:
        save.thread.join(max(0.0, deadline - time.monotonic()))
    if any(save.thread.is_alive() for save in saves):
        _exit_now(failure)


def _exit_now(failure: BaseException | None) -> None:
    """End the process without finalizing the interpreter, which would abort while a save thread still runs."""
    logging.shutdown()
    _flush_files()
    if isinstance(failure, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(exit_status())


def _flush_files() -> None:
    """Flush the buffers of open files, as the interpreter's own exit does. Skip pipes: their reader may never read."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the reader may be gone, or the script replaced the stream
            stream.flush()
    for item in gc.get_objects():
        if issubclass(type(item), _BUFFERED):
            with suppress(Exception):  # the owner of the file may have done anything to it
                if not item.closed and stat.S_ISREG(os.fstat(item.fileno()).st_mode):
                    item.flush()


atexit.register(_at_exit)
