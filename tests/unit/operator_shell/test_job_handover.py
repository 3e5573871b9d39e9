"""A job that its user gives to another controller keeps no finalizer of this operator, and loses nothing else."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping
from typing import Any

import pytest
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.operator_shell.virtual_time import run_in_virtual_time

from elastipod_operator.core.names import ANNOTATION_CONTROLLER, ANNOTATION_STATE, FINALIZER
from elastipod_operator.core.snapshot import ObservedJob
from elastipod_operator.job_handover import JobHandover
from elastipod_operator.job_intake import JobIntake
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.scope import Scope
from elastipod_operator.kube.store import Store
from elastipod_operator.watch_events import WatchEvents

OURS, THEIRS = "mine", "theirs"


class Reconciler:
    """Takes and forgets jobs, as the real one does."""

    def __init__(self, store: Store, handover: JobHandover, scope: Scope) -> None:
        self.jobs = JobIntake(store, store.drop_job, scope.holds, handover.begin)

    def wake(self, uid: str) -> None: ...


class Jobs:
    """An API server with one job, and an operator that watches it."""

    def __init__(self) -> None:
        self.job = job_body()
        self.job["metadata"]["finalizers"] = ["example.com/theirs", FINALIZER]
        self.errors: list[Exception] = []
        self.num_patches = 0
        store, scope = Store(), Scope("release", controller=OURS)
        self.handover = JobHandover(self, scope.holds)
        self.events = WatchEvents(store, Reconciler(store, self.handover, scope))  # type: ignore[arg-type]

    @property
    def finalizers(self) -> list[str]:
        found: list[str] = self.job["metadata"]["finalizers"]
        return found

    def name(self, controller: str) -> None:
        """Edit the annotation, which the watch shows."""
        self.edit(annotations={ANNOTATION_CONTROLLER: controller})
        self.events.job(copy.deepcopy(self.job), is_gone=False)

    def edit(self, **metadata: Any) -> None:
        version = int(self.job["metadata"]["resourceVersion"]) + 1
        self.job["metadata"].update(metadata, resourceVersion=str(version))

    async def effective_job(self, namespace: str, name: str) -> dict[str, Any]:
        return copy.deepcopy(self.job)

    async def patch_metadata(self, job: ObservedJob, version: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
        self.num_patches += 1
        if self.errors:
            raise self.errors.pop(0)
        if (version, job.uid) != (self.job["metadata"]["resourceVersion"], JOB_UID):
            raise ApiError(409, "the object has been modified")
        self.edit(**metadata)
        return copy.deepcopy(self.job)


def play(*controllers: str, jobs: Jobs | None = None) -> Jobs:
    """Show the job with one controller after the other; give what became of it."""

    async def scenario() -> Jobs:
        played = jobs or Jobs()
        for controller in controllers:
            played.name(controller)
        await asyncio.sleep(60)
        await played.handover.close()
        return played

    return run_in_virtual_time(scenario())


def test_a_job_that_another_controller_runs_from_now_on_can_be_deleted() -> None:
    assert play(OURS, THEIRS).finalizers == ["example.com/theirs"]


def test_the_finalizer_of_a_job_that_was_never_ours_stays() -> None:
    """Another release of Elastipod uses the same one."""
    assert play(THEIRS).num_patches == 0


def test_a_finalizer_that_the_other_controller_adds_again_stays() -> None:
    jobs = play(OURS, THEIRS)
    jobs.edit(finalizers=[FINALIZER])
    assert play(THEIRS, jobs=jobs).finalizers == [FINALIZER]


def test_what_others_write_meanwhile_stays() -> None:
    async def scenario() -> list[str]:
        jobs = Jobs()
        jobs.name(OURS)
        jobs.name(THEIRS)
        jobs.edit(finalizers=["example.com/new", FINALIZER])
        await asyncio.sleep(60)
        return jobs.finalizers

    assert run_in_virtual_time(scenario()) == ["example.com/new"]


def test_a_job_that_comes_back_meanwhile_keeps_it() -> None:
    assert FINALIZER in play(OURS, THEIRS, OURS).finalizers


def test_a_job_that_another_release_runs_and_ends_by_now_keeps_it() -> None:
    """That release found the finalizer there, and drains the job before it lets it go."""

    async def scenario() -> list[str]:
        jobs = Jobs()
        jobs.errors = [TimeoutError()]
        jobs.name(OURS)
        jobs.name(THEIRS)
        await asyncio.sleep(0)
        taken = {ANNOTATION_CONTROLLER: THEIRS, ANNOTATION_STATE: "theirs"}
        jobs.edit(annotations=taken, deletionTimestamp="2026-01-01T00:00:00Z")
        await asyncio.sleep(60)
        return jobs.finalizers

    assert FINALIZER in run_in_virtual_time(scenario())


def test_an_operator_that_has_closed_writes_nothing() -> None:
    async def scenario() -> int:
        jobs = Jobs()
        jobs.name(OURS)
        await jobs.handover.close()
        jobs.name(THEIRS)
        await asyncio.sleep(60)
        return jobs.num_patches

    assert run_in_virtual_time(scenario()) == 0


@pytest.mark.parametrize(
    ("error", "patches", "is_free"),
    [
        pytest.param(TimeoutError(), 2, True, id="no answer"),
        pytest.param(ApiError(500, "out of order"), 2, True, id="out of order"),
        pytest.param(ApiError(404, "not found"), 1, False, id="the job is gone"),
        pytest.param(ApiError(403, "forbidden"), 1, False, id="the operator may not"),
    ],
)
def test_a_call_that_fails_is_repeated_where_that_may_help(error: Exception, patches: int, is_free: bool) -> None:
    jobs = Jobs()
    jobs.errors = [error]
    play(OURS, THEIRS, jobs=jobs)
    assert (jobs.num_patches, FINALIZER not in jobs.finalizers) == (patches, is_free)
