"""The calls around the quota of one job, with an API server that has Kueue's objects."""

from __future__ import annotations

import asyncio
from typing import Any

from prometheus_client import REGISTRY
from tests.unit.kube.bodies import JOB_UID, job_body, pod_body
from tests.unit.operator_shell.queue_server import QueueServer

from elastipod_operator import clock
from elastipod_operator.core.actions import (
    Action,
    CreateWorkload,
    Plan,
)
from elastipod_operator.core.names import ANNOTATION_STATE, ANNOTATION_WORKLOAD, workload_name
from elastipod_operator.core.record import Record
from elastipod_operator.core.record_codec import encode
from elastipod_operator.core.snapshot import ObservedWorkload
from elastipod_operator.kube.api import Api
from elastipod_operator.kube.queue_api import QueueApi
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.queueing import Queues

Body = dict[str, Any]
QUEUED = {"kueue.x-k8s.io/queue-name": "gpus"}
BASE, MORE = workload_name("job", JOB_UID, 0), workload_name("job", JOB_UID, 1)
CLASS = "kueue.x-k8s.io/priority-class"
ASK_BASE = CreateWorkload(0, (("workers", 1),), "gpus")
ASK_MORE = CreateWorkload(1, (("workers", 1),), "gpus")
DELETED: dict[str, Any] = {"deletionTimestamp": "2026-03-01T12:00:00Z", "resourceVersion": "900"}


class QueueShell:
    """The calls around quota of one job, with what they rest on. woken: how often the job was."""

    def __init__(self, api: Api, server: QueueServer) -> None:
        self.server, self.store, self.woken = server, Store(lambda: clock.now()), 0
        self._api = api
        self.queues = Queues(QueueApi(api), self.store, self._wake, self._list_pods)

    @property
    def job(self) -> Job:
        return self.store.jobs[JOB_UID]

    def know(self, *, labels: Body | None = None, record: Record | None = None, **meta: Any) -> None:
        """Show a job."""
        events = {ANNOTATION_STATE: encode(record)} if record is not None else {}
        body = job_body(labels=QUEUED if labels is None else labels, annotations=events, **meta)
        self.server.put(self.server.jobs, body)
        self.store.put_job(body)

    async def do(self, *actions: Action, adopts_spec: bool = False) -> None:
        """Carry a decision out."""
        todo = Plan(record=Record(), actions=actions, adopts_spec=adopts_spec)
        await self.queues.request_quota(self.job, todo)
        await self.queues.release_quota(self.job, todo)

    async def granted(self, number: int = 0) -> ObservedWorkload:
        """Ask for a share and have it admitted."""
        await self.do(CreateWorkload(number, (("workers", 1),), "gpus"))
        self.store.put_workload(self.server.admit(workload_name("job", JOB_UID, number)))
        return self.fact(number)

    def fact(self, number: int = 0) -> ObservedWorkload:
        return next(one.fact for one in self.job.workloads.items if one.fact.number == number)

    def next_gang_check(self) -> asyncio.TimerHandle | None:
        return self.queues._workloads.state(self.job).timer

    def problem(self) -> tuple[str, str] | None:
        return self.queues.snapshot(self.job).problem

    def asked(self, what: str) -> int:
        """Give how often something was called so far, as "GET workloads"."""
        return self.server.calls.count(tuple(what.split()))  # type: ignore[arg-type]

    def _wake(self, uid: str) -> None:
        assert uid == JOB_UID
        self.woken += 1

    async def _list_pods(self, job: Job) -> None:
        bodies, version = await self._api.list_pods(job.fact.namespace, job.fact.uid)
        self.store.replace_pods(job.fact.uid, bodies, version)


def living(shell: QueueShell, ordinal: int, workload: str, phase: str = "Running") -> None:
    """Put a pod on the API server, of which no watch has told."""
    pod = pod_body(ordinal, status={"phase": phase}, annotations={ANNOTATION_WORKLOAD: workload})
    shell.server.put(shell.server.pods, pod)


def counted(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0
