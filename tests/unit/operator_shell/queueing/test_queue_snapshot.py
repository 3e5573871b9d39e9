"""What is known of a job's quota before a decision: which questions are asked, when, and what may fail."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.kube.bodies import JOB_UID, job_body, pod_body
from tests.unit.operator_shell.queue_server import AWAY, CANNOT_CONVERT
from tests.unit.operator_shell.queueing.queue_shell import (
    ASK_BASE,
    BASE,
    DELETED,
    QUEUED,
    QueueShell,
    counted,
    living,
)

from elastipod_operator.core.actions import (
    CreatePod,
    DeleteWorkload,
)
from elastipod_operator.core.names import ANNOTATION_WORKLOAD, PodId
from elastipod_operator.core.record import Record
from elastipod_operator.kube.api import ApiError


async def test_a_job_without_a_label_costs_one_question_ever(shell: QueueShell) -> None:
    shell.know(labels={})
    for _ in range(3):
        await shell.queues.observe(shell.job)
    assert shell.server.calls == [("GET", "default")]
    assert shell.queues.snapshot(shell.job).default_queue is False


async def test_a_job_that_has_begun_without_a_queue_costs_nothing(shell: QueueShell) -> None:
    shell.know(labels={}, record=Record(generation=1))
    await shell.queues.observe(shell.job)
    await shell.do()
    await shell.queues.place_pods(shell.job, [CreatePod(PodId("workers", 0, 0), 1)])
    assert shell.server.calls == []
    assert shell.queues.snapshot(shell.job).workloads == ()


async def test_the_default_queue_is_found(shell: QueueShell) -> None:
    shell.server.objects["localqueues/default"] = {}
    shell.know(labels={})
    await shell.queues.observe(shell.job)
    assert shell.queues.snapshot(shell.job).default_queue is True
    assert shell.job.workloads.is_listed


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        pytest.param(CANNOT_CONVERT, True, id="only what is there has to be converted"),
        pytest.param((403, "forbidden"), False, id="who may not look sees none"),
        pytest.param((500, "out of order"), None, id="out of order: asked again"),
    ],
)
async def test_a_question_for_the_default_queue_that_fails(
    shell: QueueShell, answer: tuple[int, str], found: bool | None
) -> None:
    shell.server.refuse["localqueues/default"] = answer
    shell.know(labels={})
    if found is None:
        with pytest.raises(ApiError):
            await shell.queues.observe(shell.job)
    else:
        await shell.queues.observe(shell.job)
    assert shell.queues.snapshot(shell.job).default_queue is found


async def test_workloads_are_listed_before_the_first_decision_and_not_again(shell: QueueShell) -> None:
    shell.know(record=Record(generation=1, queue="gpus"))
    await shell.queues.observe(shell.job)
    await shell.queues.observe(shell.job)
    assert shell.server.calls == [("GET", "workloads")]


async def test_a_label_that_was_taken_off_does_not_hide_the_quota(shell: QueueShell) -> None:
    shell.know(labels={}, record=Record(generation=1, queue="gpus"))
    await shell.queues.observe(shell.job)
    assert shell.asked("GET workloads") == 1
    shell.store.drop_job(JOB_UID)
    shell.know(labels={}, record=Record(generation=1), version=11)
    shell.store.replace_pods(JOB_UID, [pod_body(annotations={ANNOTATION_WORKLOAD: BASE})], 50)
    await shell.queues.observe(shell.job)
    assert shell.asked("GET workloads") == 2


async def test_a_job_with_pods_is_not_decided_on_while_its_quota_is_unknown(shell: QueueShell) -> None:
    shell.know(record=Record(generation=1, queue="gpus"))
    shell.store.replace_pods(JOB_UID, [pod_body()], 50)
    shell.server.refuse["list"] = CANNOT_CONVERT
    with pytest.raises(ApiError, match="conversion"):
        await shell.queues.observe(shell.job)
    del shell.server.refuse["list"]
    await shell.queues.observe(shell.job)
    assert shell.job.workloads.is_listed


async def test_a_job_without_pods_is_told_of_and_looked_at_again(shell: QueueShell) -> None:
    shell.know()
    shell.server.refuse["list"] = CANNOT_CONVERT
    await shell.queues.observe(shell.job)
    problem = shell.problem()
    assert problem is not None
    assert problem[0] == "KueueUnavailable"
    assert (shell.job.workloads.is_listed, shell.woken) == (False, 0), "a job that wakes itself would never rest"
    assert shell.next_gang_check() is not None, "nothing else may wake it"
    del shell.server.refuse["list"]
    await shell.queues.observe(shell.job)
    assert (shell.job.workloads.is_listed, shell.problem()) == (True, None)


async def test_a_job_without_pods_is_told_of_and_requests_quota_while_no_list_is_answered(
    shell: QueueShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: object) -> None:
        raise TimeoutError

    shell.know()
    with monkeypatch.context() as patched:
        patched.setattr(shell.queues._workloads.api, "list_workloads", hang)
        await shell.queues.observe(shell.job)
        assert shell.problem() == (
            "KueueUnavailable", "the API server, or Kueue behind it, does not answer: TimeoutError"
        )  # fmt: skip
        assert shell.next_gang_check() is not None, "nothing else may wake it"
        await shell.do(ASK_BASE)
    assert shell.problem() is None
    assert (len(shell.server.workloads), shell.job.workloads.is_listed) == (1, False)


async def test_where_kueue_is_missing_there_is_no_quota(shell: QueueShell) -> None:
    shell.know(record=Record(generation=1, queue="gpus"))
    shell.store.replace_pods(JOB_UID, [pod_body()], 50)
    shell.server.refuse["list"] = (404, "the server could not find the requested resource")
    await shell.queues.observe(shell.job)
    problem = shell.problem()
    assert problem is not None
    assert problem[0] == "KueueUnavailable"
    assert "install Kueue 0.15" in problem[1]
    assert shell.job.workloads.is_listed
    assert shell.next_gang_check() is None


def left(shell: QueueShell) -> tuple[int, str]:
    """Give how many Workloads of the job are known, and why they are still there."""
    seen = shell.queues.snapshot(shell.job)
    return len(seen.workloads), seen.quota_return_error


async def test_a_deleted_job_is_asked_for_what_it_has_and_again_when_its_pods_are_gone(shell: QueueShell) -> None:
    shell.know()
    await shell.do(ASK_BASE)
    shell.job.workloads.clear()
    living(shell, 0, BASE)
    await shell.queues._list_pods(shell.job)
    shell.know(**DELETED)
    await shell.queues.observe(shell.job)
    await shell.queues.observe(shell.job)
    assert (shell.asked("GET workloads"), left(shell)) == (1, (1, ""))
    shell.server.pods.clear()
    await shell.queues._list_pods(shell.job)
    await shell.queues.observe(shell.job)
    assert shell.asked("GET workloads") == 2


async def test_a_deleted_job_without_a_queue_asks_nobody(shell: QueueShell) -> None:
    shell.know(labels={}, record=Record(), **DELETED)
    await shell.queues.observe(shell.job)
    assert shell.server.calls == []


async def test_where_kueue_is_away_a_deletion_goes_on_and_says_why_it_waits(shell: QueueShell, later: Any) -> None:
    shell.know(**DELETED)
    living(shell, 0, BASE)
    shell.server.refuse["list"] = AWAY
    for _ in range(2):
        await shell.queues.observe(shell.job)
    assert shell.asked("GET workloads") == 1, "the next try has its time"
    assert left(shell) == (0, f"the job's quota could not be returned: {AWAY[1]}")
    shell.server.refuse.clear()
    later(1)
    await shell.queues.observe(shell.job)
    assert left(shell) == (0, "")


async def test_known_quota_is_returned_though_workloads_cannot_be_listed(shell: QueueShell, later: Any) -> None:
    """An overloaded API server may answer no list for minutes, and all other calls at once."""
    shell.know()
    fact = await shell.granted()
    shell.know(**DELETED)
    shell.server.refuse["list"] = (504, "the request timed out")
    for seconds in (0, 1, 2, 4, 8):
        later(seconds)
        await shell.queues.observe(shell.job)
        await shell.do(DeleteWorkload(BASE, fact.uid, "a test"))
    assert shell.asked("GET workloads") == 5, "a list that fails is tried again"
    assert shell.asked(f"DELETE {BASE}") == 1
    assert left(shell) == (0, "the job's quota could not be returned: the request timed out"), "there may be more"


async def test_what_cannot_be_deleted_is_told_until_it_can(shell: QueueShell, later: Any) -> None:
    shell.know()
    fact = await shell.granted()
    shell.know(**DELETED)
    shell.server.refuse["delete"] = (403, "forbidden")
    order = DeleteWorkload(BASE, fact.uid, "a test")
    await shell.do(order)
    later(1)
    await shell.queues.observe(shell.job)
    assert left(shell) == (1, "the job's quota could not be returned: forbidden")
    shell.server.refuse.clear()
    await shell.do(order)
    assert left(shell) == (0, "")


async def test_what_somebody_else_took_away_is_told_no_more(shell: QueueShell, later: Any) -> None:
    shell.know()
    fact = await shell.granted()
    shell.know(**DELETED)
    shell.server.refuse["delete"] = (403, "forbidden")
    await shell.do(DeleteWorkload(BASE, fact.uid, "a test"))
    later(1)
    shell.server.refuse["list"] = (404, "the server could not find the requested resource")
    await shell.queues.observe(shell.job)
    assert left(shell) == (0, ""), "the API server has no Workloads any more"


async def test_a_workload_of_other_templates_is_outdated(shell: QueueShell) -> None:
    shell.know()
    await shell.granted()
    assert [w.is_outdated for w in shell.queues.snapshot(shell.job).workloads] == [False]
    spec = job_body()["spec"]
    spec["replicaSpecs"][0]["template"]["spec"]["nodeSelector"] = {"pool": "b"}
    shell.store.put_job(job_body(spec, labels=QUEUED, version=1000))
    assert [w.is_outdated for w in shell.queues.snapshot(shell.job).workloads] == [True]
    del shell.server.workloads[BASE]["metadata"]["annotations"]
    shell.store.put_workload(shell.server.put(shell.server.workloads, shell.server.workloads[BASE]))
    assert [w.is_outdated for w in shell.queues.snapshot(shell.job).workloads] == [False], "it does not tell"


async def test_waits_and_evictions_are_counted_once(shell: QueueShell, later: Any) -> None:
    waits = {"share": "base"}
    evictions = {"share": "base", "cause": "Deactivated"}
    before = (
        counted("elastipod_quota_wait_seconds_sum", **waits),
        counted("elastipod_quota_evictions_total", **evictions),
    )
    shell.know()
    await shell.do(ASK_BASE)
    for _ in range(2):
        shell.queues.snapshot(shell.job)
        later(20)
    shell.store.put_workload(shell.server.admit(BASE))
    shell.queues.snapshot(shell.job)
    later(20)
    shell.queues.snapshot(shell.job)
    assert counted("elastipod_quota_wait_seconds_sum", **waits) == before[0] + 40
    shell.store.put_workload(shell.server.evict(BASE, "DeactivatedDueToRequeuingLimitExceeded"))
    shell.queues.snapshot(shell.job)
    shell.queues.snapshot(shell.job)
    assert counted("elastipod_quota_evictions_total", **evictions) - before[1] == 1
