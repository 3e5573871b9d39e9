"""Read the queues of all jobs together every few minutes.

A queue changes with every Workload that it admits, so a watch of queues would mostly show irrelevant changes. Kueue's messages
in Workloads show when a queue was stopped, deleted or restored; then the queues are read at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..core.queue_facts import QueueFact
from ..core.snapshot import ObservedJob, ObservedWorkload
from .api import CALL_ERRORS, ApiError
from .cluster_queues import QueueTable
from .queue_api import QueueApi
from .store import Store

log = logging.getLogger(__name__)

READ_AGAIN_S = 180.0
# While a job's queue is missing or stopped, because someone may be fixing it, and after a failed read.
PROBLEM_READ_AGAIN_S = 20.0
# Messages in Workloads can request an earlier read, but not more often than this.
LEAST_PAUSE_S = 2.0
FORBIDDEN = 403
# Kueue's messages about queues themselves. They only hasten the next read.
OF_QUEUES = ("doesn't exist", "is inactive", "is stopped", "is terminating")
STOPPED = ("ClusterQueueStopped", "LocalQueueStopped")

Body = dict[str, Any]
Key = tuple[str, str]


class QueueReader:
    """Caches the queues of all jobs. wake: requests a pass for a job. wanted: set once there is a job with a queue."""

    def __init__(self, api: QueueApi, store: Store, wake: Callable[[str], None], needed: asyncio.Event) -> None:
        self._api = api
        self._store, self._wake, self._needed = store, wake, needed
        self._hurry = asyncio.Event()
        self._facts: dict[Key, QueueFact | None] = {}
        """None: requested and not read yet."""
        self._with_problem: set[str] = set()
        """UIDs of jobs whose Workloads report a problem of their queue."""
        self._told: set[str] = set()
        """Kinds that could not be read, which was logged."""

    def fact(self, job: ObservedJob, workloads: Sequence[ObservedWorkload]) -> QueueFact | None:
        """Give the queue of a job; None before it was read. workloads: Kueue's messages in them hasten the next read."""
        queue = queue_of(job)
        if not queue:
            return None
        key = (job.namespace, queue)
        if key not in self._facts:
            self._facts[key] = None
            self._hurry.set()
        has_problem = any(
            w.eviction_reason in STOPPED or any(text in w.pending_message for text in OF_QUEUES) for w in workloads
        )
        if has_problem != (job.uid in self._with_problem):
            self._with_problem ^= {job.uid}
            self._hurry.set()
        return self._facts[key]

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._with_problem.discard(uid)

    async def run(self, namespaces: Sequence[str]) -> None:
        """Read the queues of these namespaces, or of all when there are none, until cancelled."""
        await self._needed.wait()
        while True:
            self._hurry.clear()
            is_read = False
            try:
                await self._read(namespaces or ("",))
                is_read = True
            except CALL_ERRORS as error:
                self._tell("Queues", error)
            except Exception:
                # The outer edge of this task: no response may end the operator.
                log.exception("the queues could not be read")
            await asyncio.sleep(LEAST_PAUSE_S)
            has_problem = not is_read or any(fact is not None and _has_problem(fact) for fact in self._facts.values())
            try:
                async with asyncio.timeout(PROBLEM_READ_AGAIN_S if has_problem else READ_AGAIN_S):
                    await self._hurry.wait()
            except TimeoutError:
                pass  # time for the regular read

    async def _read(self, namespaces: Sequence[str]) -> None:
        asked = set(self._facts)
        local, unread = await self._local_queues(namespaces)
        cluster = await self._allowed("ClusterQueues", self._api.list_cluster_queues)
        table = QueueTable(local, cluster)
        self._told.discard("Queues")
        jobs = {uid: (job.fact.namespace, queue_of(job.fact)) for uid, job in self._store.jobs.items()}
        wanted = asked & set(jobs.values())
        fresh = {key: self._facts[key] if key[0] in unread else table.fact(*key) for key in wanted}
        changed = {key for key, fact in fresh.items() if fact != self._facts[key]}
        later = {key: None for key in self._facts if key not in asked}
        self._facts = {**later, **fresh}
        for uid, key in jobs.items():
            if key in changed:
                self._wake(uid)

    async def _local_queues(self, namespaces: Sequence[str]) -> tuple[list[Body], set[str]]:
        """Give the LocalQueues, and the namespaces where they may not be read. Raises the refusal if that is so in all."""
        local: list[Body] = []
        refused: dict[str, ApiError] = {}
        for namespace in namespaces:
            try:
                local += await self._api.list_local_queues(namespace)
                self._told.discard(_queues_of(namespace))
            except ApiError as error:
                if error.status != FORBIDDEN:
                    raise
                refused[namespace] = error
        if len(refused) == len(namespaces):
            raise next(iter(refused.values()))
        for namespace, refusal in refused.items():
            self._tell(_queues_of(namespace), refusal)
        return local, set(refused)

    async def _allowed(self, what: str, read: Callable[[], Awaitable[list[Body]]]) -> list[Body] | None:
        """Make a read for which the operator may lack the permission; None without it."""
        try:
            found = await read()
        except ApiError as error:
            if error.status != FORBIDDEN:
                raise
            self._tell(what, error)
            return None
        self._told.discard(what)
        return found

    def _tell(self, what: str, error: Exception) -> None:
        """Log once that something cannot be read."""
        if what in self._told:
            return
        self._told.add(what)
        if isinstance(error, ApiError) and error.status == FORBIDDEN:
            log.info("jobs get no warnings about their queues: no permission to read %s: %s", what, error)
        else:
            log.info("%s cannot be read now: %s %s", what, type(error).__name__, error)


def _queues_of(namespace: str) -> str:
    return f"LocalQueues of namespace {namespace}"


def _has_problem(fact: QueueFact) -> bool:
    """Whether the queue admits nothing."""
    behind = fact.cluster_queue
    return any(not one.exists or one.stop or one.inactive for one in (fact, behind) if one is not None)


def queue_of(job: ObservedJob) -> str:
    """Give the queue of a job according to its record or label; empty for none."""
    return (job.record.queue if job.record is not None else "") or job.queue or job.queue_in_template
