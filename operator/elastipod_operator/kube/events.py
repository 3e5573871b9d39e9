"""Events about jobs, written in the background: nothing depends on them, because the record and the status say the same.

The Events of one job keep their order. Delivery is best effort, as in Kubernetes' own components: an Event that cannot be
written is logged and dropped, the newest ones are dropped when too many wait, and queued ones are lost when the process dies.
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
from .writes import log_fields, timed_write

log = logging.getLogger(__name__)

# Events written in parallel, of different jobs, and the length of each queue.
QUEUES, LIMIT = 4, 1000
# Time to write queued Events at the end; the lease is released only after that.
FLUSH_S = 1.0


@dataclass(slots=True)
class EventQueue:
    """Events that are written one after the other."""

    waiting: deque[tuple[ObservedJob, JobEvent, datetime]] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None
    is_full: bool = False


class Events:
    """Writes Events, each once, in the background."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._queues = [EventQueue() for _ in range(QUEUES)]
        self._closed = False

    def record(self, job: ObservedJob, events: Iterable[JobEvent]) -> None:
        """Queue Events with the present time; none after `close`."""
        if self._closed:
            return
        queue, at = self._queues[zlib.crc32(job.uid.encode()) % QUEUES], datetime.now(UTC)
        for event in events:
            if len(queue.waiting) >= LIMIT:
                self._drop(queue, job)
            else:
                queue.waiting.append((job, event, at))
        if queue.waiting and queue.task is None:
            queue.task = asyncio.create_task(self._write(queue), name="events")

    async def close(self) -> None:
        """Write queued Events for at most FLUSH_S; then drop the rest."""
        self._closed = True
        tasks = [queue.task for queue in self._queues if queue.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=FLUSH_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if left := sum(len(queue.waiting) for queue in self._queues):
            log.warning("%d events were not written before the end", left)

    async def _write(self, queue: EventQueue) -> None:
        try:
            while queue.waiting:
                job, event, at = queue.waiting[0]
                await self._try(job, event, at)
                queue.waiting.popleft()
                queue.is_full = False
        finally:
            queue.task = None

    async def _try(self, job: ObservedJob, event: JobEvent, at: datetime) -> None:
        try:
            await timed_write("event", self._api.emit(job, event, at))
        except CALL_ERRORS as error:
            log.warning("an event could not be written: %s %s", type(error).__name__, error, extra=log_fields(job))
        except Exception:
            # The outer edge of this task: an error about one Event must not stop the others.
            log.exception("an event could not be written", extra=log_fields(job))

    def _drop(self, queue: EventQueue, job: ObservedJob) -> None:
        metrics.API_CALLS.labels("event", "dropped").inc()
        if not queue.is_full:
            queue.is_full = True
            log.warning("events are dropped, because too many wait to be written", extra=log_fields(job))
