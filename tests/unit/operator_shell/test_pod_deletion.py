"""Pods of a job that go all at once: many at a time, and one that cannot be deleted does not keep the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tests.unit.agents.fake_agent import until
from tests.unit.core.builders import job, pod
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.operator_shell.pod_controls import Told, pod_control_for

from elastipod_operator.core.actions import DeletePod
from elastipod_operator.in_flight import WRITE_PARALLEL
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.store import Job
from elastipod_operator.pod_deletion import PodDeletion

PODS = 100


class SlowApi:
    """Deletes when it is let, and notes how many wait at the same time."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.tries = 0
        self.deleted: list[str] = []
        self.waiting = self.most = 0
        self.let = asyncio.Event()
        self.let.set()

    async def delete_pod(self, namespace: str, name: str, uid: str, **how: Any) -> dict[str, Any]:
        self.tries += 1
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0)
        await self.let.wait()
        self.waiting -= 1
        if name == self.broken:
            raise ApiError(500, "out of order")
        self.deleted.append(name)
        return {"kind": "Status"}


async def delete_all(
    api: SlowApi,
    told: list[str],
    then: Callable[[PodDeletion, Callable[[], None]], Awaitable[None]],
    failures: Told | None = None,
) -> None:
    """Have all pods deleted by one decision; then: what follows, given a way to decide the same again."""
    deletion = PodDeletion(pod_control_for(api, failures or Told()), JOB_UID)
    actions = [DeletePod(pod(n).name, pod(n).uid, "a test", False) for n in range(PODS)]

    def decide() -> None:
        left = [action for action in actions if action.name not in api.deleted]
        assert deletion.keep_only(left)
        deletion.begin(Job(job_body(), job(), 1), deletion.missing(left), lambda action: told.append(action.name))

    decide()
    await then(deletion, decide)
    await deletion.calls.close()


async def test_many_pods_are_deleted_at_a_time_but_not_all_nor_any_twice() -> None:
    api, told = SlowApi(), list[str]()
    api.let.clear()

    async def decided_again_meanwhile(_: PodDeletion, decide: Callable[[], None]) -> None:
        await until(lambda: api.waiting == WRITE_PARALLEL)
        decide()
        api.let.set()
        await until(lambda: len(told) == PODS)

    await delete_all(api, told, decided_again_meanwhile)
    assert sorted(told) == sorted(api.deleted)
    assert (api.tries, api.most) == (PODS, WRITE_PARALLEL)


async def test_who_is_to_stay_after_all_is_not_deleted_any_more() -> None:
    api, told = SlowApi(), list[str]()
    api.let.clear()

    async def nobody_is_to_go(deletion: PodDeletion, _: Callable[[], None]) -> None:
        await until(lambda: api.waiting == WRITE_PARALLEL)
        assert not deletion.keep_only(()), "some were on their way"
        api.let.set()
        await deletion.calls.wait_unwanted()
        assert deletion.keep_only(())

    await delete_all(api, told, nobody_is_to_go)
    assert len(told) == api.tries == WRITE_PARALLEL


async def test_one_that_cannot_be_deleted_keeps_no_other_and_is_tried_again_after_a_while(
    later: Callable[[float], None],
) -> None:
    api, told, control = SlowApi(broken=pod(3).name), list[str](), Told()

    async def again(_: PodDeletion, decide: Callable[[], None]) -> None:
        await until(lambda: control.failures == ["out of order"])
        decide()
        assert api.tries == PODS, "too early"
        later(0.3)  # 0.2 s and up to a quarter more
        decide()
        await until(lambda: len(control.failures) == 2)

    await delete_all(api, told, again, control)
    assert (len(api.deleted), api.tries) == (PODS - 1, PODS + 1)
    assert sorted(told) == sorted(api.deleted), "only who was deleted is told to leave"
