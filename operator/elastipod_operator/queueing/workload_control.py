"""What all calls about quota share: the state of a job between two passes, retries, and error texts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar

from .. import clock, metrics
from ..core.backoff import doubled
from ..core.reasons import Reason, ReasonAndMessage
from ..core.snapshot import ObservedWorkload
from ..kube.api import CALL_ERRORS, ApiError
from ..kube.placement import PlacementError
from ..kube.queue_api import QueueApi
from ..kube.queue_lookups import KueueLookups, QuotaError
from ..kube.queue_reader import QueueReader
from ..kube.store import Job, Store
from ..kube.writes import gather_all, is_conflict, is_refusal, log_fields

log = logging.getLogger(__name__)
T = TypeVar("T")

# Delay before a retry; it doubles each time.
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
# Parallel calls for one job, which may have hundreds of increments.
MAX_PARALLEL_CALLS = 8
PLACING, RELEASING = "placing", "returning"
KUEUE_MISSING = (
    "the API server has no Workloads of kueue.x-k8s.io/v1beta2; install Kueue 0.15 or newer, or remove the label "
    "kueue.x-k8s.io/queue-name from the job and its templates"
)


@dataclass(slots=True)
class Retry:
    """The back-off of one kind of call, by the clock of timers: the pass that a timer requests must not come too early."""

    tries: int = 0
    _until_s: float | None = None

    def is_due(self) -> bool:
        """Whether a retry is due."""
        return self._until_s is None or clock.steady() >= self._until_s

    def note_failure(self) -> float:
        """Record a failure; gives the seconds until the retry."""
        self.tries += 1
        wait_s = doubled(timedelta(seconds=FIRST_RETRY_S), timedelta(seconds=LAST_RETRY_S), self.tries).total_seconds()
        self._until_s = clock.steady() + wait_s
        return wait_s

    def reset(self) -> None:
        """Clear the back-off after success."""
        self.tries, self._until_s = 0, None


@dataclass(slots=True)
class QuotaState:
    """The state of a job's quota between two passes. All of it can be lost without harm."""

    default_queue: bool | None = None
    problems: dict[str, ReasonAndMessage] = field(default_factory=dict)
    """Reason and sentence for each kind of failed request."""
    requesting: Retry = field(default_factory=Retry)
    listing: Retry = field(default_factory=Retry)
    """Of the Workloads of a deleted job. Apart from `releasing`: what is known is released even if no list is answered."""
    releasing: Retry = field(default_factory=Retry)
    reporting_ready: Retry = field(default_factory=Retry)
    prioritizing: Retry = field(default_factory=Retry)
    timer: asyncio.TimerHandle | None = None
    """The next pass that was requested."""
    failed_releases: dict[str, int] = field(default_factory=dict)
    """By UID of the Workload."""
    unplaced: str = ""
    """The Workload whose pods could not be created as Kueue assigned them, by name."""
    admitted: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """Workloads as last read, by name: pods can be replaced while Kueue is down."""
    waiting: dict[str, datetime] = field(default_factory=dict)
    """When each pending Workload was first seen, by UID; for metrics."""
    evicted: set[str] = field(default_factory=set)
    late: int = 0
    """Number of Workloads whose quota is overdue."""


class WorkloadControl:
    """The API, the store and the state of each job. wake: requests a pass for a job."""

    def __init__(self, api: QueueApi, store: Store, wake: Callable[[str], None]) -> None:
        self.api = api
        self.store = store
        self.wake = wake
        self.lookups = KueueLookups(api)
        self.needed = asyncio.Event()
        """Set once there is a job with a queue."""
        self.reader = QueueReader(api, store, wake, self.needed)
        self._states: dict[str, QuotaState] = {}
        metrics.EVICTIONS_LATE.set_function(lambda: sum(one.late for one in self._states.values()))

    def state(self, job: Job) -> QuotaState:
        """Give the state of a job; a new one is created."""
        return self._states.setdefault(job.fact.uid, QuotaState())

    def known_state(self, job: Job) -> QuotaState | None:
        """Give the state of a job; None if there is none."""
        return self._states.get(job.fact.uid)

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._states.pop(uid, None)
        self.reader.forget(uid)

    def retry_all(self) -> None:
        """Retry everything that failed, at once."""
        for uid, state in list(self._states.items()):
            retries = (state.requesting, state.listing, state.releasing, state.reporting_ready, state.prioritizing)
            if state.problems or any(retry.tries for retry in retries):
                for retry in retries:
                    retry.reset()
                self.wake(uid)

    def report_problem(self, job: Job, what: str, problem: QuotaError) -> None:
        """Report a problem in the job's status."""
        problems, said = self.state(job).problems, (problem.reason, str(problem))
        if problems.get(what) != said:
            problems[what] = said
            self.wake(job.fact.uid)

    def clear_problem(self, job: Job, what: str) -> None:
        """Remove a problem from the job's status."""
        state = self.known_state(job)
        if state is not None and state.problems.pop(what, None) is not None:
            self.wake(job.fact.uid)

    def retry_later(self, job: Job, retry: Retry, what: str, error: Exception) -> None:
        """Log a failure and request a pass at the time of the retry."""
        level = logging.INFO if is_conflict(error) else logging.WARNING
        log.log(level, "%s: %s %s", what, type(error).__name__, error, extra=log_fields(job.fact))
        self.wake_for(job, retry)

    def wake_for(self, job: Job, retry: Retry) -> None:
        """Request a pass at the time of the next try, whatever else wakes the job before."""
        asyncio.get_running_loop().call_later(retry.note_failure(), self.wake, job.fact.uid)

    def wake_later(self, job: Job, seconds: float) -> None:
        """Request a pass after a while, or sooner if that was requested before."""
        loop, state = asyncio.get_running_loop(), self.state(job)
        if state.timer is not None:
            if loop.time() < state.timer.when() <= loop.time() + seconds:
                return  # a timer for each pass would cause more and more passes
            state.timer.cancel()
        state.timer = loop.call_later(seconds, self.wake, job.fact.uid)

    def workload(self, job: Job, name: str) -> ObservedWorkload | None:
        """Give a Workload of a job from the cache."""
        return next((one.fact for one in job.workloads.items if one.fact.name == name), None)

    def put(self, job: Job, body: Mapping[str, Any]) -> None:
        """Cache a Workload that was read or written."""
        if self.store.put_workload(body) is not None:
            self.wake(job.fact.uid)

    def drop(self, job: Job, name: str) -> None:
        """Forget a deleted Workload."""
        fact = self.workload(job, name)
        if fact is not None and job.workloads.drop(fact.uid):
            self.wake(job.fact.uid)


async def call_for_each(items: Iterable[T], do: Callable[[T], Awaitable[None]]) -> None:
    """Make calls for several items in parallel, started in their order. A failure does not stop the others, unless no server answers.

    Raises what the first failed call raised, after all are done.
    """
    slots, is_vain = asyncio.Semaphore(MAX_PARALLEL_CALLS), False

    async def do_one(item: T) -> None:
        nonlocal is_vain
        async with slots:
            if is_vain:
                return
            try:
                await do(item)
            except CALL_ERRORS as error:
                is_vain = is_vain or not isinstance(error, ApiError) or is_kueue_away(error)
                raise

    await gather_all(*map(do_one, items))


def is_for_good(error: Exception) -> bool:
    """Whether the API server refuses the call until something is changed."""
    return is_refusal(error) and not is_conflict(error) and not (isinstance(error, ApiError) and is_kueue_away(error))


def is_kueue_away(error: ApiError | TimeoutError) -> bool:
    """Whether the API server cannot reach Kueue, which validates and converts its own objects."""
    if isinstance(error, TimeoutError):
        return True
    text = str(error)
    return error.status >= 500 and ("failed calling webhook" in text or "conversion webhook" in text)


def quota_error(error: Exception) -> QuotaError:
    """Say why quota could not be requested."""
    if isinstance(error, QuotaError):
        return error
    if isinstance(error, PlacementError):
        return QuotaError(Reason.POD_PLACEMENT_FAILED, str(error))
    if not isinstance(error, ApiError):
        return QuotaError(
            Reason.KUEUE_UNAVAILABLE, f"the API server, or Kueue behind it, does not answer: {type(error).__name__}"
        )
    if error.status == 404 and 'namespaces "' not in str(error):
        return QuotaError(Reason.KUEUE_UNAVAILABLE, KUEUE_MISSING)
    if is_kueue_away(error):
        return QuotaError(Reason.KUEUE_UNAVAILABLE, f"Kueue does not answer the API server: {error}")
    return QuotaError(Reason.WORKLOAD_REFUSED, f"the API server refused the request for quota: {error}")


def release_error(error: Exception) -> QuotaError:
    """Say why quota could not be returned."""
    cause = error if isinstance(error, ApiError) else f"the API server does not answer ({type(error).__name__})"
    return QuotaError(Reason.QUOTA_NOT_RETURNED, f"the job's quota could not be returned: {cause}")
