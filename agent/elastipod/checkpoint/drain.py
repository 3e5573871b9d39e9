"""What a process that is about to end still waits for: a save that is under way, or nothing more of it.

A process that leaves in order waits for its saves. One that failed does not: its agent learns of a failure by the end of the
process, and a save may take minutes. What such a save has begun in storage is hidden, and the next generation deletes it.
A process that was asked to leave by a deadline waits no longer than that allows, once memory holds the step.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from elastipod.local_worker import local_worker
from elastipod.worker_file import EventLevel

log = logging.getLogger(__name__)

SHORT_DRAIN_S = (
    180.0  # a drain with less time than this does not wait for storage if memory outlives it; Spot gives 120 s
)
EXIT_MARGIN_S = 10.0  # of the drain's time, kept for leaving
_GIVE_UP_S = 1.0  # for a save to notice that it was given up
_BUFFERED = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


class PendingSave(Protocol):
    """A save."""

    thread: threading.Thread
    is_abandoned: bool


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """A drain as one rank knows it. left_s: until its deadline; leaves: whether this rank's pod goes, None when not known."""

    left_s: float
    leaves: bool | None

    def as_json(self) -> list[Any]:
        return [self.left_s, self.leaves]


def current_drain() -> DrainNotice | None:
    """Give the drain that this rank was asked for, None where it was not, or has no deadline."""
    worker = local_worker()
    if worker is None:
        return None
    event = worker.file.event()
    if event.level == EventLevel.NONE or not event.deadline:
        return None
    return DrainNotice(event.deadline - time.time(), worker.file.leaves())


def storage_wait_s(left_s: Sequence[float], *, survives_drain: bool) -> float:
    """Give how long a drain waits for durable storage once memory holds the step, in seconds.

    left_s: what each rank that knows a deadline has left; outlives: whether the memory of the pods that stay holds all of the
    state. Where it does not, or nobody knows who stays, storage is waited for as far as the deadline allows.
    """
    least = min(left_s)
    return 0.0 if survives_drain and least < SHORT_DRAIN_S else max(0.0, least - EXIT_MARGIN_S)


@contextmanager
def checkpoint_call() -> Iterator[None]:
    """Let the agent know that this rank is inside a checkpoint call, so that its silence is not taken for a hang."""
    worker = local_worker()
    if worker is None or worker.file.is_in_checkpoint(worker.local_rank):
        yield
        return
    worker.file.set_in_checkpoint(worker.local_rank, True)
    try:
        yield
    finally:
        worker.file.set_in_checkpoint(worker.local_rank, False)


_pending_saves: weakref.WeakSet[Any] = weakref.WeakSet()


def wait_at_exit(save: PendingSave) -> None:
    """Have the end of the process wait for a save, unless it has failed or the save was given up."""
    _pending_saves.add(save)


def _at_exit() -> None:
    failure = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    for save in list(_pending_saves):
        if failure is None and not save.is_abandoned:
            save.thread.join()
    saves = [save for save in _pending_saves if save.thread.is_alive()]
    for save in saves:
        save.is_abandoned = True
    deadline = time.monotonic() + _GIVE_UP_S
    for save in saves:
        save.thread.join(max(0.0, deadline - time.monotonic()))
    if any(save.thread.is_alive() for save in saves):
        _exit_now(failure)


def _exit_now(failure: BaseException | None) -> None:
    """End the process without the interpreter's own end, which a thread of it would not outlive: it would abort."""
    logging.shutdown()
    _flush_files()
    if isinstance(failure, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(0 if failure is None else 1)


def _flush_files() -> None:
    """Write out what is buffered of open files, as the interpreter's own end does. A pipe may wait for ever for its reader."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # the reader of a pipe may be gone, and the script may have replaced the stream
            stream.flush()
    for item in gc.get_objects():
        if issubclass(type(item), _BUFFERED):
            with suppress(Exception):  # whatever the owner of the file has done to it
                if not item.closed and stat.S_ISREG(os.fstat(item.fileno()).st_mode):
                    item.flush()


atexit.register(_at_exit)
