"""Pods of a job that go all at once: many at a time, and one that cannot be deleted does not keep the others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.core.builders import job, pod
from tests.unit.kube.bodies import job_body

from elastipod_operator import pod_writes
from elastipod_operator.agents.board import open_session
from elastipod_operator.core.actions import DeletePod
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.reconciler import Reconciler

PODS = 100


class SlowApi:
    """Deletes when it is let, and notes how many wait at the same time."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.deleted: list[str] = []
        self.waiting = self.most = 0

    async def delete_pod(self, namespace: str, name: str, uid: str, *, force: bool) -> dict[str, Any]:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0)
        self.waiting -= 1
        if name == self.broken:
            raise ApiError(500, "out of order")
        self.deleted.append(name)
        return {"kind": "Status"}


async def delete_all(api: Any, told: list[str]) -> None:
    async with open_session() as session:
        reconciler = Reconciler(api, Store(), session)
        actions = [DeletePod(pod(n).name, pod(n).uid, "a test", False) for n in range(PODS)]
        try:
            await reconciler._pod_writes.delete(Job(job_body(), job(), 1), {}, actions, lambda a: told.append(a.name))
        finally:
            await reconciler.close()


async def test_many_pods_are_deleted_at_a_time_but_not_all() -> None:
    api = SlowApi()
    told: list[str] = []
    await delete_all(api, told)
    assert sorted(told) == sorted(api.deleted)
    assert (len(api.deleted), api.most) == (PODS, pod_writes.WRITE_PARALLEL)


async def test_one_that_cannot_be_deleted_is_told_of_after_the_others_went() -> None:
    api = SlowApi(broken=pod(3).name)
    told: list[str] = []
    with pytest.raises(ApiError):
        await delete_all(api, told)
    assert len(api.deleted) == PODS - 1
    assert sorted(told) == sorted(api.deleted), "only who was deleted is told to leave"
