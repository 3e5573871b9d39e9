"""Quota of jobs: what decisions observe of Kueue, and the calls that they request (docs/design/queues.md).

Kueue may be down for a while. That does not end a reconcile pass: failed requests and releases are retried and reported as
the reason why the job waits. A pass waits for two results only: the first list of the Workloads of a job with pods, without
which the job would seem to have lost its quota, and the placement of pods before they are created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..core.actions import CreatePod, Plan
from ..kube.queue_api import QueueApi
from ..kube.store import Job, Store
from .pod_placement import Placed, place_pods
from .priorities import update_priorities
from .queue_snapshot import QueueSnapshot, observe, snapshot
from .quota_release import release_quota, report_pods_ready
from .workload_control import PLACING, WorkloadControl
from .workload_creation import request_quota


class Queues:
    """Everything about quota. wake: requests a pass for a job. list_pods: lists the pods of a job into the store."""

    def __init__(
        self, api: QueueApi, store: Store, wake: Callable[[str], None], list_pods: Callable[[Job], Awaitable[None]]
    ) -> None:
        self._workloads = WorkloadControl(api, store, wake)
        self._list_pods = list_pods

    @property
    def needed(self) -> asyncio.Event:
        """Set once there is a job with a queue."""
        return self._workloads.needed

    async def poll(self, namespaces: Sequence[str]) -> None:
        """Keep the cache of queues up to date, in these namespaces or in all, until cancelled."""
        await self._workloads.reader.run(namespaces)

    def forget(self, uid: str) -> None:
        """Drop the state of a deleted job."""
        self._workloads.forget(uid)

    def retry_all(self) -> None:
        """Retry everything that waits for Kueue, because it answers again."""
        self._workloads.retry_all()

    async def observe(self, job: Job) -> None:
        """Read what a decision about a job needs. Raises as Api does."""
        await observe(self._workloads, job)

    def snapshot(self, job: Job) -> QueueSnapshot:
        """Give the queue part of the snapshot."""
        return snapshot(self._workloads, job)

    async def request_quota(self, job: Job, todo: Plan) -> None:
        """Request the quota of a plan, at its priority. Failures are reported and retried later."""
        await update_priorities(self._workloads, job, todo)
        await request_quota(self._workloads, job, todo)

    async def place_pods(self, job: Job, actions: Sequence[CreatePod]) -> tuple[list[Placed], str]:
        """Give the pods that may be created now, each with the additions from its quota, and why others may not.

        Raises as Api does.
        """
        return await place_pods(self._workloads, job, actions)

    def forget_placement(self, job: Job) -> None:
        """Forget why pods could not be placed, because none is to be created."""
        self._workloads.clear_problem(job, PLACING)

    async def release_quota(self, job: Job, todo: Plan) -> None:
        """Release quota on which no pod is left, and report ready pods to Kueue."""
        await release_quota(self._workloads, job, todo, self._list_pods)
        await report_pods_ready(self._workloads, job, todo)
