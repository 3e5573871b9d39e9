"""The moment at which the kernel reports the end of a process, also of one that is somebody else's child."""

from __future__ import annotations

import os
import select
import threading
import time
from types import TracebackType

from bench.common.processes import Failed


class ExitWatch:
    """A context that watches one process. Raises ProcessLookupError on entry when it is gone already."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._exited_at: float | None = None

    def __enter__(self) -> ExitWatch:
        self._process = os.pidfd_open(self._pid)
        self._over = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, name="exit watch")
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        os.eventfd_write(self._over, 1)
        self._thread.join()
        os.close(self._process)
        os.close(self._over)

    def exited_at(self, within_s: float) -> float:
        """Wait for the end and give its moment (monotonic). Raises Failed after the deadline."""
        self._thread.join(within_s)
        if self._exited_at is None:
            raise Failed(f"process {self._pid} did not end within {within_s:g} s")
        return self._exited_at

    def _watch(self) -> None:
        ready, _, _ = select.select([self._process, self._over], [], [])
        if self._process in ready:
            self._exited_at = time.monotonic()
