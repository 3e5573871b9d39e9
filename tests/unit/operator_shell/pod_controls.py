"""A control for the calls of one job's pods, without a reconciler: it notes what it is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from tests.unit.kube.bodies import job_body

from elastipod_operator.core.actions import CreatePod
from elastipod_operator.kube.api import Api
from elastipod_operator.kube.job_keys import JobKeys
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.pod_control import PodControl


class Told:
    """What the calls told. woken: how often the job was; problem: why pods cannot be placed."""

    def __init__(self) -> None:
        self.woken = 0
        self.failures: list[str] = []
        self.problem = ""

    def wake(self, uid: str) -> None:
        self.woken += 1

    async def failed(self, job: Job, error: Exception) -> None:
        self.failures.append(str(error))

    async def place(self, job: Job, actions: Sequence[CreatePod]) -> Any:
        return [] if self.problem else [(action, None) for action in actions], self.problem


def pod_control_for(api: object, told: Told) -> PodControl:
    """Give a control whose store knows the job of `job_body` and no pods."""
    store = Store()
    store.put_job(job_body())

    async def list_pods(job: Job) -> None:
        bodies, version = await cast(Api, api).list_pods(job.fact.namespace, job.fact.uid)
        store.replace_pods(job.fact.uid, bodies, version)

    return PodControl(
        cast(Api, api), store, JobKeys(), place=told.place, list_pods=list_pods, forget=lambda _: None, wake=told.wake,
        failed=told.failed,
    )  # fmt: skip
