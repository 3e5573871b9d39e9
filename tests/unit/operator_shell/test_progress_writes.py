"""When the shell writes the progress of a job: along with its record, or by itself once it is due, and never in the way of anything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, cast

import pytest
from tests.unit.core.builders import NOW, agent, job, pid, pod, seconds, trains
from tests.unit.kube.bodies import job_body

from elastipod_operator import clock
from elastipod_operator.agents.agent_ports import agents_over
from elastipod_operator.agents.status_requests import open_session
from elastipod_operator.core.actions import Plan
from elastipod_operator.core.names import ANNOTATION_CHECKPOINT, ANNOTATION_STATE, ANNOTATION_STEP, ANNOTATION_STEP_AT
from elastipod_operator.core.record_codec import format_time
from elastipod_operator.core.snapshot import ObservedAgent
from elastipod_operator.job_task import Decision
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.events import Events
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.reconciler import Reconciler

RECORD = replace(trains(generation=3), running_since=NOW - seconds(300))


class Patches:
    """An API server that keeps the annotations that it was sent. error: what it answers instead."""

    def __init__(self, error: Exception | None = None) -> None:
        self.annotations: list[dict[str, Any]] = []
        self.error = error

    async def patch_metadata(self, fact: object, version: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
        self.annotations.append(dict(metadata["annotations"]))
        if self.error is not None:
            raise self.error
        return job_body()


class Statuses:
    """What two members told last; a pod that is no member makes more steps."""

    def fact(self, pod_uid: str) -> ObservedAgent:
        return agent(step={pod(0).uid: 41, pod(1).uid: 42}.get(pod_uid, 99))

    def progress(self, pod_uids: Iterable[str], generation: int = 0) -> dict[str, Any]:
        return {"model": {"progressCount": 40}} if pod(0).uid in set(pod_uids) else {}

    async def close(self) -> None:
        """Nothing was opened."""


@pytest.fixture
async def reconciler(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reconciler]:
    monkeypatch.setattr(clock, "now", lambda: NOW)
    async with open_session() as session:
        found = Reconciler(cast(Api, Patches()), Store(), agents_over(session), Events(cast(Api, Patches())))
        found._agents._statuses = cast(Any, Statuses())
        yield found
        await found.close()


def written(ago_s: float, step: str = "7") -> Job:
    """A job whose progress was written so long ago."""
    body = job_body()
    at = format_time(NOW - seconds(ago_s))
    body["metadata"]["annotations"] = {ANNOTATION_STEP: step, ANNOTATION_STEP_AT: at, ANNOTATION_CHECKPOINT: "40"}
    return Job(body, job(RECORD), 10, pods={one.uid: one for one in (pod(0), pod(1), pod(pid(2)))})


async def by_itself(
    reconciler: Reconciler, job: Job, todo: Plan, error: Exception | None = None
) -> tuple[list[dict[str, Any]], datetime | None]:
    patches = Patches(error)
    reconciler._reconcile.api = cast(Any, patches)
    look_at = await reconciler._reconcile._write_progress(job, todo)
    return patches.annotations, look_at


async def test_news_is_written_once_it_is_due(reconciler: Reconciler) -> None:
    patches, look_at = await by_itself(reconciler, written(70), Plan(record=RECORD))
    assert patches == [{ANNOTATION_STEP: "42", ANNOTATION_STEP_AT: format_time(NOW)}]
    assert look_at == NOW + seconds(60)


async def test_before_that_the_time_is_given(reconciler: Reconciler) -> None:
    assert await by_itself(reconciler, written(20), Plan(record=RECORD)) == ([], NOW + seconds(40))


async def test_a_job_without_news_is_looked_at_again_later(reconciler: Reconciler) -> None:
    assert await by_itself(reconciler, written(70, "42"), Plan(record=RECORD)) == ([], NOW + seconds(60))


@pytest.mark.parametrize("error", [ApiError(409, "the object has been modified"), ApiError(403, "no"), TimeoutError()])
async def test_a_failure_is_left_to_a_later_pass(reconciler: Reconciler, error: Exception) -> None:
    patches, look_at = await by_itself(reconciler, written(70), Plan(record=RECORD), error)
    assert len(patches) == 1
    assert look_at == NOW + seconds(60)


@pytest.mark.parametrize(
    "todo",
    [Plan(record=replace(RECORD, outcome="Completed")), Plan(record=RECORD, skips_record=True), Plan(record=trains(running_since=None))],
)  # fmt: skip
async def test_nothing_is_written_of_a_job_that_does_not_train_or_is_another_operators(
    reconciler: Reconciler, todo: Plan
) -> None:
    assert await by_itself(reconciler, written(5000), todo) == ([], None)


async def test_nothing_is_written_of_a_job_that_is_being_deleted(reconciler: Reconciler) -> None:
    found = written(70)
    found.fact = replace(found.fact, deleting_since=NOW)
    assert await by_itself(reconciler, found, Plan(record=RECORD)) == ([], None)


async def test_it_goes_along_with_the_record(reconciler: Reconciler) -> None:
    """Also the last step of a job that completes, which nobody would write later."""
    patches = Patches()
    reconciler._reconcile.api = cast(Any, patches)
    todo = Plan(record=replace(RECORD, outcome="Completed"))
    await reconciler._reconcile._write_record(Decision(written(5), todo, [], []))
    (annotations,) = patches.annotations
    assert ANNOTATION_STATE in annotations
    assert annotations[ANNOTATION_STEP] == "42"


async def test_it_makes_no_write_of_a_record_that_is_unchanged(reconciler: Reconciler) -> None:
    patches = Patches()
    reconciler._reconcile.api = cast(Any, patches)
    todo = Plan(record=RECORD)
    first = written(5)
    await reconciler._reconcile._write_record(Decision(first, todo, [], []))
    (annotations,) = patches.annotations
    first.body["metadata"]["annotations"] |= {**annotations, ANNOTATION_STEP: "7"}
    await reconciler._reconcile._write_record(Decision(first, todo, [], []))
    assert len(patches.annotations) == 1
