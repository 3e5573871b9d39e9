"""What the API server refuses for good is told to the user, once, is tried again more and more rarely, and holds nothing else up."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.unit.agents.fake_agent import until
from tests.unit.core.builders import LONG_AGO, job, pid, pod
from tests.unit.kube.bodies import JOB_UID, container, job_body, pod_body
from tests.unit.operator_shell.api_server import ApiServer
from tests.unit.operator_shell.pod_controls import Told, pod_control_for
from tests.unit.operator_shell.shells import Shell

from elastipod_operator import job_writes, pod_control
from elastipod_operator import reconciler as reconciler_module
from elastipod_operator.agents.agent_ports import agents_over
from elastipod_operator.agents.status_requests import open_session
from elastipod_operator.core.actions import DeletePod
from elastipod_operator.core.names import ANNOTATION_STATE, FINALIZER
from elastipod_operator.core.reasons import OpenReason, Reason
from elastipod_operator.core.record import Record
from elastipod_operator.core.record_codec import encode
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.events import Events
from elastipod_operator.kube.store import Job, Store
from elastipod_operator.kube.writes import is_refusal
from elastipod_operator.pod_deletion import PodDeletion
from elastipod_operator.reconciler import Reconciler

BY_RIGHTS = (403, 'pods "x" is forbidden: User "elastipod" cannot delete resource "pods"')
BY_WEBHOOK = (500, 'Internal error occurred: failed calling webhook "guard.example": connection refused')

Later = Callable[[float], None]


class Writes:
    """The deletions of one job, with three pods that are to go."""

    def __init__(self, api: Api, server: ApiServer) -> None:
        self.server, self.told = server, Told()
        self.gone: list[str] = []
        for ordinal in range(3):
            server.put(server.pods, pod_body(ordinal))
        self.deletion = PodDeletion(pod_control_for(api, self.told), JOB_UID)

    async def delete(self, *ordinals: int) -> None:
        """Have pods deleted, as one decision does, and wait for what comes of it."""
        actions = [DeletePod(pod(n).name, pod(n).uid, "a test") for n in ordinals]
        self.told.woken = 0
        assert self.deletion.keep_only(actions)
        missing = self.deletion.missing(actions)
        self.deletion.begin(Job(job_body(), job(), 1), missing, lambda a: self.gone.append(a.name))
        await until(lambda: self.deletion.calls.is_idle)

    def tries(self) -> int:
        return sum(call[0] == "DELETE" for call in self.server.calls)


@pytest.fixture
def writes(api: Api, server: ApiServer) -> Writes:
    return Writes(api, server)


@pytest.mark.parametrize("answer", [BY_RIGHTS, (422, "Invalid value"), (403, "admission webhook denied"), BY_WEBHOOK])
async def test_a_refused_deletion_is_told_and_tried_again_later(
    writes: Writes, later: Later, answer: tuple[int, str]
) -> None:
    writes.server.refuse_deletions = answer
    await writes.delete(0, 1, 2)
    told = f"the API server refuses to delete pod {pod(0).name} (and 2 more), and the operator tries again: {answer[1]}"
    assert (writes.deletion.why_kept, writes.told.woken, writes.tries()) == (told, 1, 3)
    await writes.delete(0, 1, 2)
    assert (writes.deletion.why_kept, writes.told.woken, writes.tries()) == (told, 0, 3), "too early to try again"
    for wait_s in (5, 10, 20):  # and up to a quarter more
        later(wait_s * 0.9)
        await writes.delete(0)
        later(wait_s * 0.4)
        tries = writes.tries()
        await writes.delete(0)
        assert writes.tries() == tries + 1
    writes.server.refuse_deletions = None
    later(60)
    await writes.delete(0)
    assert (writes.deletion.why_kept, writes.told.woken, writes.gone) == ("", 2, [pod(0).name]), (
        "gone, and told no more"
    )


async def test_who_need_not_go_any_more_is_told_of_no_more(writes: Writes, later: Later) -> None:
    writes.server.refuse_deletions = BY_RIGHTS
    await writes.delete(0, 1)
    await writes.delete(1)
    assert f"pod {pod(1).name}, and the operator" in writes.deletion.why_kept
    assert writes.told.woken == 1
    await writes.delete()
    assert (writes.deletion.why_kept, writes.told.woken) == ("", 1)


async def test_a_deletion_that_fails_otherwise_is_no_refusal_and_rests_for_less(writes: Writes, later: Later) -> None:
    writes.server.refuse_deletions = (503, "no etcd")
    for wait_s in (0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15, 15):
        tries = writes.tries()
        await writes.delete(0)
        assert writes.tries() == tries + 1
        later(wait_s * 0.9)
        await writes.delete(0)
        assert writes.tries() == tries + 1, "too early to try again"
        later(wait_s * 0.4)
    assert writes.deletion.why_kept == ""
    assert len(writes.told.failures) == 9
    assert "no etcd" in writes.told.failures[0]
    writes.server.refuse_deletions = None
    await writes.delete(0)
    assert writes.gone == [pod(0).name]


def test_what_will_not_be_had_so() -> None:
    found = [is_refusal(ApiError(*answer)) for answer in (BY_RIGHTS, BY_WEBHOOK, (503, "no etcd"), (429, "slower"))]
    assert found == [True, True, False, False]
    assert not is_refusal(TimeoutError())


@pytest.fixture
async def shell(api: Api, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shell]:
    """A shell that knows no job, and tries quickly again."""
    monkeypatch.setattr(pod_control, "REFUSAL_FIRST_S", 0.05)
    monkeypatch.setattr(pod_control, "REFUSAL_LAST_S", 0.1)
    monkeypatch.setattr(reconciler_module, "LAST_RETRY_S", 0.1)
    store = Store()
    async with open_session() as session:
        reconciler = Reconciler(api, store, agents_over(session), Events(api))
        yield Shell(reconciler, store, server)
        await reconciler.close()


def events(shell: Shell, reason: str) -> list[str]:
    return [event["message"] for event in shell.server.events if event["reason"] == reason]


async def test_the_user_sees_on_the_job_what_cannot_be_deleted(shell: Shell) -> None:
    shell.server.refuse_deletions = BY_RIGHTS
    for incarnation in (0, 1, 2):  # two of them are to go
        labels = {**pod_body()["metadata"]["labels"], "elastipod.io/incarnation": str(incarnation)}
        name = pid(0, incarnation).name("job")
        shell.server.put(shell.server.pods, pod_body(name=name, uid=f"uid-{name}", labels=labels))
    shell.submit()
    await until(lambda: len(shell.server.pods) == 6)  # those that are wanted are made all the same
    await until(lambda: shell.condition("Warning").get("reason") == "PodsNotDeleted")
    assert shell.state()["type"] == "Created"
    told = shell.condition("Warning")["message"]
    assert "pod job-workers-0 (and 1 more)" in told
    assert BY_RIGHTS[1] in told
    tries = len(shell.server.calls)
    await until(lambda: len(shell.server.calls) >= tries + 8)  # refused again and again
    shell.server.refuse_deletions = None
    await until(lambda: len(shell.server.pods) == 4 and shell.condition("Warning") == {})
    await until(lambda: len(events(shell, "PodsNotDeleted")) == 1)


async def test_a_job_that_has_ended_or_is_deleted_says_what_cannot_be_deleted_too(shell: Shell) -> None:
    shell.server.refuse_deletions = BY_RIGHTS
    shell.server.put(shell.server.pods, pod_body(0))
    ended = Record(generation=1, outcome="Failed", outcome_reason=OpenReason("WorkerCrash"), ended_at=datetime.now(UTC))
    shell.submit(annotations={ANNOTATION_STATE: encode(ended)}, finalizers=[FINALIZER])
    await until(lambda: shell.condition("Warning").get("reason") == "PodsNotDeleted")
    assert shell.state()["type"] == "Failed"
    body = shell.server.jobs["job"]
    body["metadata"]["deletionTimestamp"] = "2026-03-01T12:00:01Z"
    shell.watch_shows(shell.server.put(shell.server.jobs, body))
    tries = len(shell.server.calls)
    await until(lambda: len(shell.server.calls) >= tries + 3)
    assert shell.condition("Warning").get("reason") == "PodsNotDeleted"
    shell.server.refuse_deletions = None
    await until(lambda: shell.server.jobs == {})


@pytest.mark.parametrize(
    ("what", "reason"), [("record", "RecordNotWritten"), ("status", "StatusNotWritten"), ("job", "JobNotDeleted")]
)
async def test_a_job_that_cannot_be_written_gets_one_event(shell: Shell, what: str, reason: str) -> None:
    shell.server.refuse_job[what] = (403, "admission webhook denied the request: no more writes today")
    ended = Record(
        generation=1, outcome="Completed", outcome_reason=Reason.COMPLETED, ended_at=datetime(2026, 3, 1, tzinfo=UTC)
    )
    annotations = {ANNOTATION_STATE: encode(ended)} if what == "job" else {}
    shell.submit({"runPolicy": {"ttlSecondsAfterFinished": 1}}, annotations=annotations)
    await until(lambda: len(events(shell, reason)) == 1)
    assert "no more writes today" in events(shell, reason)[0]
    tries = len(shell.server.calls)
    await until(lambda: len(shell.server.calls) >= tries + 6)
    shell.server.refuse_job.clear()
    await until(lambda: shell.server.jobs == {} if what == "job" else shell.state().get("type") == "Created")
    assert len(events(shell, reason)) == 1


async def test_it_is_told_again_when_the_event_is_gone_and_when_it_worked_meanwhile(later: Later) -> None:
    told: list[str] = []

    class Noted:
        def record(self, job: Any, events: Any) -> None:
            told.extend(note.reason for note in events)

    noted: Any = Noted()
    writes = job_writes.JobWrites(noted)

    async def refused() -> None:
        raise ApiError(422, "Invalid value")

    async def conflict() -> None:
        raise ApiError(409, "the object has been modified")

    async def worked() -> None:
        return None

    async def make(call: Any) -> None:
        with contextlib.suppress(ApiError):
            await writes.write("status", job(), call())

    for call, so_far in ((conflict, 0), (refused, 1), (refused, 1), (worked, 1), (refused, 2)):
        await make(call)
        assert len(told) == so_far
    later(3600)
    await make(refused)
    assert len(told) == 3
    writes.forget(JOB_UID)
    writes.forget(job().uid)
    await make(refused)
    assert len(told) == 4


async def test_that_a_pod_with_a_sidecar_is_deleted_is_an_event(shell: Shell) -> None:
    ended = Record(
        generation=1, members=(pid(0),), outcome="Completed", outcome_reason=Reason.COMPLETED, ended_at=LONG_AGO
    )
    running = {"phase": "Running", "containerStatuses": [container(running={})]}
    shell.server.put(shell.server.pods, pod_body(status=running))
    shell.submit({"runPolicy": {"cleanPodPolicy": "None"}}, annotations={ANNOTATION_STATE: encode(ended)})
    await until(lambda: shell.server.pods == {})
    await until(lambda: len(events(shell, "SidecarStillRuns")) == 1)
    assert f"pod {pod(0).name} deleted" in events(shell, "SidecarStillRuns")[0]
