"""What creating and deleting the pods of all jobs has in common, and what is remembered of refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from . import clock
from .core.actions import CreatePod
from .core.backoff import backoff
from .in_flight import WRITE_PARALLEL
from .kube.job_keys import JobKeys
from .kube.placement import Placement
from .kube.ports import PodCalls
from .kube.store import Job, Store

# Calls that the API server refused (quota, admission, rights) are repeated with this back-off.
REFUSAL_FIRST_S, REFUSAL_LAST_S = 5.0, 120.0
# Calls that failed otherwise.
FAILURE_FIRST_S, FAILURE_LAST_S = 0.2, 15.0

Place = Callable[[Job, Sequence[CreatePod]], Awaitable[tuple[list[tuple[CreatePod, Placement | None]], str]]]


@dataclass(slots=True)
class RetryBackoff:
    """Why something is not done for now, and until when; may be lost without harm. Without a reason it has only failed."""

    why: str = ""
    until: datetime | None = None
    refused: int = 0
    broken: int = 0

    def is_active(self) -> bool:
        """Whether it is too early to try again."""
        return self.until is not None and clock.now() < self.until

    def note_refusal(self, why: str, key: str) -> float:
        """Note that it was refused; gives the seconds until it is tried again. key: spreads the waits of different jobs."""
        self.why, self.refused = why, self.refused + 1
        return self._wait(REFUSAL_FIRST_S, REFUSAL_LAST_S, self.refused, key)

    def note_failure(self, key: str) -> float:
        """Note that it failed, for reasons that are not the job's; what was told of an earlier refusal is told on."""
        self.broken += 1
        return self._wait(FAILURE_FIRST_S, FAILURE_LAST_S, self.broken, key)

    def note_progress(self) -> None:
        """Note that some of it was done: what is refused or fails now is the first of its row, not one more in vain."""
        self.refused = self.broken = 0

    def reset(self) -> bool:
        """Note that it was done; gives whether a reason has been told, which holds no more."""
        was_told = bool(self.why)
        self.why, self.until, self.refused, self.broken = "", None, 0, 0
        return was_told

    def _wait(self, first_s: float, last_s: float, times: int, key: str) -> float:
        wait = backoff(timedelta(seconds=first_s), timedelta(seconds=last_s), times, key)
        self.until = clock.now() + wait
        return wait.total_seconds()


@dataclass(frozen=True, slots=True)
class PodControl:
    """What calls for pods need.

    place: where pods may run, and why others may not. list_pods: bring the store up to date. forget: the pod of a UID is
    gone. wake: have a job looked at soon. failed: is told of a call that failed and was not refused.
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
        """Have a job looked at later."""
        asyncio.get_running_loop().call_later(seconds, self.wake, uid)
