"""Events about jobs, written beside the decisions: none waits for them, for what they say follows from record and status.

Those of one job keep their order. They are told as well as it goes, as Kubernetes' own components do it: one that cannot be
written is logged and left out, and so are the newest when too many wait; a process that dies takes those that wait with it.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from .. import metrics
from ..core.actions import JobEvent
from ..core.snapshot import ObservedJob
from .api import CALL_ERRORS, Api
from .writes import about, written

log = logging.getLogger(__name__)

# So many are written at once, of different jobs; so many wait in each line.
LINES, LIMIT = 4, 1000
# Those that wait at the end get so long; the lease is given back only then.
FLUSH_S = 1.0


@dataclass(slots=True)
class Line:
    """Events that wait for each other."""

    waiting: deque[tuple[ObservedJob, JobEvent, datetime]] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None
    is_full: bool = False


class Events:
    """Writes Events, each once, in the background."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._lines = [Line() for _ in range(LINES)]
        self._closed = False

    def tell(self, job: ObservedJob, events: Iterable[JobEvent]) -> None:
        """Have Events written soon, with the time of now; none after the end."""
        if self._closed:
            return
        line, at = self._lines[zlib.crc32(job.uid.encode()) % LINES], datetime.now(UTC)
        for event in events:
            if len(line.waiting) >= LIMIT:
                self._drop(line, job)
            else:
                line.waiting.append((job, event, at))
        if line.waiting and line.task is None:
            line.task = asyncio.create_task(self._write(line), name="events")

    async def close(self) -> None:
        """Write those that wait, not longer than FLUSH_S, and no more after that."""
        self._closed = True
        tasks = [line.task for line in self._lines if line.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=FLUSH_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if left := sum(len(line.waiting) for line in self._lines):
            log.warning("%d events were not written before the end", left)

    async def _write(self, line: Line) -> None:
        try:
            while line.waiting:
                job, event, at = line.waiting[0]
                await self._try(job, event, at)
                line.waiting.popleft()
                line.is_full = False
        finally:
            line.task = None

    async def _try(self, job: ObservedJob, event: JobEvent, at: datetime) -> None:
        try:
            await written("event", self._api.emit(job, event, at))
        except CALL_ERRORS as error:
            log.warning("an event could not be written: %s %s", type(error).__name__, error, extra=about(job))
        except Exception:
            # The outer edge of this task: whatever is wrong with one Event must not keep the others back.
            log.exception("an event could not be written", extra=about(job))

    def _drop(self, line: Line, job: ObservedJob) -> None:
        metrics.API_CALLS.labels("event", "dropped").inc()
        if not line.is_full:
            line.is_full = True
            log.warning("events are left out, for too many wait to be written", extra=about(job))
