"""A job that its user gives to another controller while the watch is late: an answer shows it first."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.operator_shell.api_server import ApiServer
from tests.unit.operator_shell.shells import Shell, open_shell, settled

from elastipod_operator.core.names import ANNOTATION_CONTROLLER, ANNOTATION_STATE
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.scope import Scope
from elastipod_operator.kube.store import Job

HANDED_OVER: list[tuple[str, str]] = []


def hand_over(job: Any, body: Any) -> None:
    HANDED_OVER.append((job.uid, body["metadata"]["annotations"][ANNOTATION_CONTROLLER]))


@pytest.fixture
async def shell(api: Api, server: ApiServer) -> AsyncIterator[Shell]:
    """A shell of a release that runs the jobs that name no controller."""
    HANDED_OVER.clear()
    async with open_shell(api, server, runs=Scope("mine").holds, hand_over=hand_over) as shell:
        yield shell


def give_away(server: ApiServer) -> str:
    """Edit the job, which no watch shows; gives the record of the other controller."""
    job = server.jobs["job"]
    job["metadata"]["annotations"] |= {ANNOTATION_CONTROLLER: "theirs", ANNOTATION_STATE: "of theirs"}
    server.put(server.jobs, job)
    return "of theirs"


async def is_let_go(shell: Shell, record: str) -> None:
    """Wait until nothing is known of the job, and see that nothing more is done about it."""
    await until(lambda: JOB_UID not in shell.store.jobs)
    assert HANDED_OVER == [(JOB_UID, "theirs")]
    known = [*shell.server.calls]
    await asyncio.sleep(0.5)
    assert {path for _, path in shell.server.calls[len(known) :]} <= {"events"}
    assert shell.server.jobs["job"]["metadata"]["annotations"][ANNOTATION_STATE] == record


async def test_a_conflict_shows_it(shell: Shell, server: ApiServer) -> None:
    shell.submit()
    await settled(shell)
    record = give_away(server)
    gone = copy.deepcopy(server.pods.pop(min(server.pods)))
    server.version += 1
    gone["metadata"]["resourceVersion"] = str(server.version)
    shell.store.drop_pod(gone)
    shell.reconciler.wake(JOB_UID)
    await is_let_go(shell, record)


async def test_the_answer_to_a_status_shows_it(shell: Shell, server: ApiServer) -> None:
    shell.submit()
    await settled(shell)
    job = shell.store.jobs[JOB_UID]
    record = give_away(server)
    await shell.reconciler._report_failed_pass(job, shell.reconciler._job_tasks[JOB_UID], RuntimeError("a bug"))
    await is_let_go(shell, record)


@pytest.mark.parametrize("controller", ["", "theirs"])
async def test_a_job_of_that_name_that_came_instead_is_run_if_it_is_ours(
    shell: Shell, server: ApiServer, controller: str
) -> None:
    shell.submit()
    await settled(shell)
    before: Job = shell.store.jobs[JOB_UID]
    body = job_body(annotations={ANNOTATION_CONTROLLER: controller} if controller else {})
    body["metadata"]["uid"] = "another"
    server.jobs["job"] = server.put({}, body)
    await shell.reconciler._after_failure(before, ApiError(409, "the UID differs"))
    assert [*shell.store.jobs] == ([] if controller else ["another"])
    assert HANDED_OVER == []


async def test_a_job_that_was_let_go_meanwhile_is_not_taken_again(shell: Shell, server: ApiServer) -> None:
    shell.submit()
    await settled(shell)
    before = shell.store.jobs[JOB_UID]
    shell.reconciler.forget(JOB_UID)
    await shell.reconciler._after_failure(before, ApiError(409, "a late answer"))
    assert shell.store.jobs == {}
