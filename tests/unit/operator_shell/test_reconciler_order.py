"""What the shell does before and after it calls agents."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.patience import PATIENCE_S
from tests.unit.core.builders import NOW, job, pid, pod, trains
from tests.unit.kube.bodies import JOB_UID, job_body

from elastipod_operator.agents.agent_ports import agents_over
from elastipod_operator.agents.commands import Command
from elastipod_operator.agents.status_requests import open_session
from elastipod_operator.core.actions import (
    Action,
    CreatePod,
    DeletePod,
    DeleteWorkload,
    Plan,
    ShutDownAgent,
    StartWorkers,
    StopWorkers,
)
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.snapshot import Condition
from elastipod_operator.job_task import Decision, JobTask, actions_of
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.events import Events
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.kube.writes import gather_all
from elastipod_operator.pod_creation import PodCreation
from elastipod_operator.pod_deletion import PodDeletion
from elastipod_operator.reconciler import Reconciler


class Notes:
    """An API server and agents that only note who was called. is_stale: somebody wrote the job meanwhile."""

    def __init__(self, *, is_stale: bool = False) -> None:
        self.done: list[str] = []
        self.is_stale = is_stale

    async def patch_metadata(self, fact: object, version: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
        self.done.append(f"patch {dict(metadata)}")
        if self.is_stale:
            raise ApiError(409, "the object has been modified")
        return job_body()

    async def delete_pod(self, namespace: str, name: str, uid: str, **how: Any) -> dict[str, Any]:
        self.done.append("delete")
        return {"kind": "Status"}

    async def send(self, commands: list[Command]) -> list[str]:
        self.done += [command.path for command in commands]
        return []


RECORD = trains(generation=3)


def decided(*actions: Action) -> Plan:
    return Plan(
        record=RECORD,
        actions=actions,
        skips_record=True,
        conditions=(Condition("Running", True, OpenReason("x"), "x", NOW),),
    )


class Queue(Notes):
    """Quota beside these, where pods cannot be placed."""

    async def release_quota(self, job: Job, todo: Plan) -> None:
        self.done.append("give back")

    async def request_quota(self, job: Job, todo: Plan) -> None:
        self.done.append("ask")

    async def place_pods(self, job: Job, actions: list[CreatePod]) -> Any:
        self.done.append("create")
        raise ApiError(409, "out of order")


def job_task_of(reconciler: Reconciler) -> JobTask:
    return JobTask(PodCreation(reconciler._control, JOB_UID), PodDeletion(reconciler._control, JOB_UID))


def decision(todo: Plan) -> Decision:
    """A decision about a job with two pods, none of whose calls is under way."""
    held = Job(job_body(), job(RECORD), 10, pods={p.uid: p for p in (pod(0), pod(1))})
    return Decision(held, todo, actions_of(CreatePod, todo), actions_of(DeletePod, todo))


async def carry_out(reconciler: Reconciler, todo: Plan) -> None:
    """Do what follows from a decision, and wait for what comes of its calls for pods."""
    job_task, made = job_task_of(reconciler), decision(todo)
    steps = reconciler._reconcile
    calls = steps.agents.calls(made)
    try:
        await steps._write_record(made)
        await gather_all(steps._act(made, calls), steps._supply(job_task, made, calls, may_create=True))
    finally:
        await asyncio.gather(*job_task.deletion.calls._runners)


async def carried_out(events: Notes, todo: Plan) -> list[str]:
    async with open_session() as session:
        reconciler = Reconciler(cast(Api, events), Store(), agents_over(session), Events(cast(Api, events)))
        reconciler._agents._sender = cast(Any, events)
        if isinstance(events, Queue):
            reconciler._reconcile.queues = cast(Any, events)
            reconciler._control = replace(reconciler._control, place=cast(Any, events.place_pods))
        try:
            await carry_out(reconciler, todo)
        except ApiError:
            events.done.append("409")
        finally:
            await asyncio.gather(*reconciler._agents._shutdowns)
            await reconciler.close()
            await asyncio.sleep(0)
    return events.done


async def test_an_agent_is_told_to_leave_after_its_pod_was_deleted() -> None:
    name = pod(0).name
    todo = decided(ShutDownAgent(name), DeletePod(name, pod(0).uid, "a test"), StartWorkers(pod(1).name, 1))
    assert await carried_out(Notes(), todo) == ["/start", "delete", "/shutdown"]


async def test_an_agent_whose_pod_may_not_be_deleted_is_left_at_its_work_and_the_others_leave() -> None:
    class Guarded(Notes):
        async def delete_pod(self, namespace: str, name: str, uid: str, **how: Any) -> dict[str, Any]:
            if name == pod(0).name:
                raise ApiError(403, "admission webhook denied the request: not while it trains")
            return await super().delete_pod(namespace, name, uid, **how)

    go = [action for p in (pod(0), pod(1)) for action in (ShutDownAgent(p.name), DeletePod(p.name, p.uid, "a test"))]
    assert await carried_out(Guarded(), decided(*go)) == ["delete", "/shutdown"]
    assert await carried_out(Guarded(), decided(ShutDownAgent(pod(0).name))) == ["/shutdown"], "whose pod is to stay"


async def test_nobody_waits_for_an_agent_that_does_not_hear_that_it_is_to_leave() -> None:
    class Deaf(Notes):
        async def send(self, commands: list[Command]) -> list[str]:
            if any(command.path == "/shutdown" for command in commands):
                await asyncio.Event().wait()
            return await super().send(commands)

    events, name = Deaf(), pod(0).name
    async with open_session() as session:
        reconciler = Reconciler(cast(Api, events), Store(), agents_over(session), Events(cast(Api, events)))
        reconciler._agents._sender = cast(Any, events)
        async with asyncio.timeout(PATIENCE_S):
            await carry_out(reconciler, decided(ShutDownAgent(name), DeletePod(name, pod(0).uid, "a test")))
            await reconciler.close()
    assert events.done == ["delete"]


async def test_pods_that_cannot_be_made_keep_nobody_from_going_nor_quota_from_kueue() -> None:
    todo = decided(
        CreatePod(pid(2), 2), DeletePod(pod(0).name, pod(0).uid, "a test"), DeleteWorkload("w", "u", "a test")
    )
    assert await carried_out(Queue(), todo) == ["give back", "ask", "create", "delete", "409"]


@pytest.mark.parametrize(
    ("generation", "is_stale", "done"),
    [
        pytest.param(3, False, ["/stop"], id="of the generation on record: nothing is asked"),
        pytest.param(2, False, ["/stop"], id="of an older one"),
        pytest.param(4, False, ["patch {}", "/stop"], id="of a newer one: whether the record is the newest"),
        pytest.param(4, True, ["patch {}", "409"], id="it is not: nobody is stopped"),
    ],
)
async def test_who_stops_what_is_newer_than_its_record_asks_first(
    generation: int, is_stale: bool, done: list[str]
) -> None:
    todo = decided(StopWorkers(pod(0).name, generation, graceful=False, timeout_s=0))
    assert await carried_out(Notes(is_stale=is_stale), todo) == done
