"""What the creation and the deletion of pods share, and the back-off after failed calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from . import clock
from .core.actions import CreatePod
from .core.backoff import backoff
from .in_flight import WRITE_PARALLEL
from .kube.api_ports import PodCalls
from .kube.job_keys import JobKeys
from .kube.placement import Placement
from .kube.store import Job, Store

# Back-off of calls that the API server refused (quota, admission, rights).
REFUSAL_FIRST_S, REFUSAL_LAST_S = 5.0, 120.0
# Back-off of calls that failed otherwise.
FAILURE_FIRST_S, FAILURE_LAST_S = 0.2, 15.0

Place = Callable[[Job, Sequence[CreatePod]], Awaitable[tuple[list[tuple[CreatePod, Placement | None]], str]]]


@dataclass(slots=True)
class RetryBackoff:
    """The back-off of a call. refusal: the API server's message, empty after other failures. Can be lost without harm.

    It ends by the clock of timers, so that the retry that a timer wakes for is never too early: UTC may be slower for a while.
    """

    refusal: str = ""
    refused: int = 0
    failed: int = 0
    _retry_at: datetime | None = None
    _until_s: float = 0.0

    def is_active(self) -> bool:
        """Whether it is too early to try again."""
        return self._retry_at is not None and clock.steady() < self._until_s

    @property
    def retry_at(self) -> datetime | None:
        """When it ends, approximately, for plans; None if it has ended."""
        return self._retry_at if self.is_active() else None

    def note_refusal(self, message: str, key: str) -> float:
        """Record a refusal; gives the seconds until the retry. key: spreads the retries of different jobs."""
        self.refusal, self.refused = message, self.refused + 1
        return self._wait(REFUSAL_FIRST_S, REFUSAL_LAST_S, self.refused, key)

    def note_failure(self, key: str) -> float:
        """Record a failure that is not a refusal; gives the seconds until the retry. An earlier refusal is still reported."""
        self.failed += 1
        return self._wait(FAILURE_FIRST_S, FAILURE_LAST_S, self.failed, key)

    def note_progress(self) -> None:
        """Record that some calls succeeded: the next failure is the first of a new series."""
        self.refused = self.failed = 0

    def reset(self) -> bool:
        """Clear the back-off after success. True if a refusal had been reported, which no longer holds."""
        was_reported = bool(self.refusal)
        self.refusal, self._retry_at, self.refused, self.failed = "", None, 0, 0
        return was_reported

    def _wait(self, first_s: float, last_s: float, times: int, key: str) -> float:
        wait = backoff(timedelta(seconds=first_s), timedelta(seconds=last_s), times, key)
        self._retry_at, self._until_s = clock.now() + wait, clock.steady() + wait.total_seconds()
        return wait.total_seconds()


@dataclass(frozen=True, slots=True)
class PodControl:
    """The dependencies of pod calls.

    place: gives where pods may run, and why others may not. list_pods: lists the pods of a job into the store. forget: drops a
    deleted pod by UID. wake: requests a pass for a job. failed: called for each failure that is not a refusal.
    """

    api: PodCalls
    store: Store
    keys: JobKeys
    place: Place
    list_pods: Callable[[Job], Awaitable[None]]
    forget: Callable[[str], None]
    wake: Callable[[str], None]
    failed: Callable[[Job, Exception], Awaitable[None]]
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WRITE_PARALLEL))

    def wake_in(self, seconds: float, uid: str) -> None:
        """Request a pass for a job after a while."""
        asyncio.get_running_loop().call_later(seconds, self.wake, uid)
