"""Writes to the jobs themselves. One that is refused cannot be told in the status, so an Event tells it."""

from __future__ import annotations

from collections.abc import Awaitable
from datetime import datetime, timedelta
from typing import TypeVar

from . import clock
from .core.actions import JobEvent
from .core.snapshot import ObservedJob
from .kube.api import ApiError
from .kube.ports import EventSink
from .kube.writes import is_overtaken, is_refusal, written

T = TypeVar("T")

# The API server keeps Events for an hour: then it is told again.
TOLD_FOR = timedelta(hours=1)
# By kind of write: the Event's reason, and what it says before the API server's own words.
REFUSED = {
    "record": (
        "RecordNotWritten",
        "the API server refuses to write the job's record, without which nothing is begun or changed; it is tried again",
    ),
    "status": ("StatusNotWritten", "the API server refuses to write the job's status; it is tried again"),
    "job": (
        "JobNotDeleted",
        "the API server refuses to delete the job, whose ttlSecondsAfterFinished is over; it is tried again",
    ),
}


class JobWrites:
    """Makes the calls that write jobs, and remembers what users were told; that may be lost without harm."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._told: dict[str, dict[str, datetime]] = {}
        """When it was told last, by UID of the job and kind of write."""

    async def written(self, what: str, job: ObservedJob, call: Awaitable[T]) -> T:
        """Make a call that writes. what: a key of REFUSED. Raises as Api does."""
        try:
            answer = await written(what, call)
        except ApiError as error:
            if is_refusal(error) and not is_overtaken(error):
                self._tell(what, job, error)
            raise
        if job.uid in self._told:
            self._told[job.uid].pop(what, None)
        return answer

    def forget(self, uid: str) -> None:
        """Stop caring for a job that is gone."""
        self._told.pop(uid, None)

    def _tell(self, what: str, job: ObservedJob, error: ApiError) -> None:
        told, now = self._told.setdefault(job.uid, {}), clock.now()
        if what in told and now - told[what] < TOLD_FOR:
            return
        told[what] = now
        reason, text = REFUSED[what]
        self._events.tell(job, [JobEvent(reason, f"{text}: {error}", warning=True)])
