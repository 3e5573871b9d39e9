"""Quota of jobs: what a decision sees of Kueue, and the calls that it asks for (docs/design/queues.md).

Kueue may be away for a while. Nothing here ends a pass over a job because of that: what could not be asked or given back is
tried again, and told as the reason why the job waits. Two things are waited for: the first list of the Workloads of a job that
has pods, for without it the job would seem to have lost its quota; and where pods may run, before any are created.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..core.actions import CreatePod, Plan
from ..kube.queue_api import QueueApi
from ..kube.store import Job, Store
from .pod_placement import Placed, placed
from .priorities import rank
from .queue_snapshot import Seen, look, seen
from .quota_release import give_back, mark
from .workload_control import Desk
from .workload_creation import ask


class Queues:
    """The calls around quota. wake: have a job looked at soon. list_pods: bring the store up to date with its pods."""

    def __init__(
        self, api: QueueApi, store: Store, wake: Callable[[str], None], list_pods: Callable[[Job], Awaitable[None]]
    ) -> None:
        self._desk = Desk(api, store, wake)
        self._list_pods = list_pods

    @property
    def wanted(self) -> asyncio.Event:
        """Set once there is a job with a queue."""
        return self._desk.wanted

    async def follow(self, namespaces: Sequence[str]) -> None:
        """Keep what is known of the queues themselves up to date, in these namespaces or in all, until cancelled."""
        await self._desk.reader.run(namespaces)

    def forget(self, uid: str) -> None:
        """Stop caring for a job that is gone."""
        self._desk.forget(uid)

    def are_back(self) -> None:
        """Have all that waits for Kueue tried again: it has just been seen again."""
        self._desk.retry_all()

    async def look(self, job: Job) -> None:
        """Ask what must be known before a decision about a job. Raises as Api does."""
        await look(self._desk, job)

    def seen(self, job: Job) -> Seen:
        """Give what is known now."""
        return seen(self._desk, job)

    async def ask(self, job: Job, todo: Plan) -> None:
        """Ask for the quota that a decision wants, at the priority it wants. What is refused is told, and tried again later."""
        await rank(self._desk, job, todo)
        await ask(self._desk, job, todo)

    async def placed(self, job: Job, actions: Sequence[CreatePod]) -> tuple[list[Placed], str]:
        """Give the pods that may be created now, each with what it gets from its quota, and why others may not.

        Raises as Api does.
        """
        return await placed(self._desk, job, actions)

    async def give_back(self, job: Job, todo: Plan) -> None:
        """Give quota back of which the API server shows no living pod, and tell Kueue how pods are."""
        await give_back(self._desk, job, todo, self._list_pods)
        await mark(self._desk, job, todo)
