"""Writes to the jobs themselves. A refused write cannot be reported in the status, so it is reported as an Event."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime, timedelta
from typing import TypeVar

from . import clock
from .core.actions import JobEvent
from .core.reasons import Reason
from .core.snapshot import ObservedJob
from .kube.api import ApiError
from .kube.api_ports import EventSink
from .kube.writes import is_conflict, is_refusal, timed_write

T = TypeVar("T")

# The API server keeps Events for an hour; after that the refusal is reported again.
REPORT_EVERY = timedelta(hours=1)
# By kind of write: the Event's reason, and its text before the API server's message.
REFUSED = {
    "record": (
        Reason.RECORD_NOT_WRITTEN,
        "the API server refuses to write the job's state record, without which nothing is started or changed; the operator tries again",
    ),
    "status": (Reason.STATUS_NOT_WRITTEN, "the API server refuses to write the job's status; the operator tries again"),
    "job": (
        Reason.JOB_NOT_DELETED,
        "the API server refuses to delete the job after its ttlSecondsAfterFinished; the operator tries again",
    ),
}


class JobWrites:
    """Makes the calls that write jobs, and reports refusals as Events. Its state can be lost without harm."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._reported_at: dict[str, dict[str, datetime]] = {}
        """Time of the last report, by UID of the job and kind of write."""

    async def write(self, what: str, job: ObservedJob, call: Awaitable[T]) -> T:
        """Make a call that writes. what: a key of REFUSED. Raises as Api does."""
        try:
            answer = await timed_write(what, call)
        except ApiError as error:
            if is_refusal(error) and not is_conflict(error):
                self._report_refusal(what, job, error)
            raise
        if job.uid in self._reported_at:
            self._reported_at[job.uid].pop(what, None)
        return answer

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._reported_at.pop(uid, None)

    def _report_refusal(self, what: str, job: ObservedJob, error: ApiError) -> None:
        reported_at, now = self._reported_at.setdefault(job.uid, {}), clock.now()
        if what in reported_at and now - reported_at[what] < REPORT_EVERY:
            return
        reported_at[what] = now
        reason, text = REFUSED[what]
        self._events.record(job, [JobEvent(reason, f"{text}: {error}")])
