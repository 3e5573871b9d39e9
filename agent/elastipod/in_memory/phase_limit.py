"""Ends this process when a phase takes longer than it may: the next deeper kind of restart follows."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elastipod.in_memory.phases import LIMITS, Phase

log = logging.getLogger(__name__)

EXIT_CODE = 75  # EX_TEMPFAIL: another process may succeed


def _end_process(sentence: str) -> None:
    log.critical(sentence)
    faulthandler.dump_traceback(sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_CODE)  # a process that hangs in a driver runs no finalizer


class PhaseLimit:
    """Watches the phase of this rank from a thread of its own, which waits for nothing but the clock."""

    def __init__(self, on_expiry: Callable[[str], None] = _end_process) -> None:
        self._on_expiry = on_expiry
        self._changed = threading.Condition()
        self._phase = Phase.TRAINING
        self._limit_s: float | None = None
        self._until: float | None = None  # None in a phase without a limit, and in a pause
        self._pauses = 0
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def enter(self, phase: Phase) -> None:
        """Begin a phase: its limit runs from now."""
        limit = LIMITS[phase]
        with self._changed:
            self._phase, self._limit_s = phase, None if limit is None else limit.total_seconds()
            if self._thread is None and self._limit_s is not None:
                self._thread = threading.Thread(target=self._watch, name="elastipod-phase-limit", daemon=True)
                self._thread.start()
            self._restart()

    def progress(self) -> None:
        """Restart the limit of this phase, because it made progress. Any thread may call it, also in a pause, which it does not end."""
        with self._changed:
            self._restart(wakes=False)  # the watch waits for the former end, and then for this one

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspend this phase's limit for code that has its own limits or belongs to the script. The limit restarts from zero afterwards."""
        with self._changed:
            self._pauses += 1
            self._restart(wakes=False)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._restart()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _restart(self, *, wakes: bool = True) -> None:
        """Let the limit run from now, unless it is paused."""
        self._until = None if self._limit_s is None or self._pauses else time.monotonic() + self._limit_s
        if wakes:
            self._changed.notify_all()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                left = None if self._until is None else self._until - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            if self._is_closed:
                return
            sentence = (
                f"this rank has been {self._phase} for more than {self._limit_s:g} s; its process ends, so that another "
                "one can take its place"
            )
        self._on_expiry(sentence)
