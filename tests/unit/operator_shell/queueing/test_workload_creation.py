"""Requests for quota: Workloads that are created, refused, or found to be somebody else's."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.unit.kube.bodies import job_body
from tests.unit.operator_shell.queue_server import AWAY
from tests.unit.operator_shell.queueing.queue_shell import (
    ASK_BASE,
    ASK_MORE,
    BASE,
    MORE,
    QUEUED,
    QueueShell,
)

from elastipod_operator.core.actions import (
    CreateWorkload,
)
from elastipod_operator.kube.applied import encode_applied


async def test_asking_creates_a_workload_that_is_known_at_once(shell: QueueShell) -> None:
    timed = ("elastipod_api_write_seconds_count", {"what": "workload"})
    before = REGISTRY.get_sample_value(*timed) or 0
    shell.know()
    await shell.do(ASK_BASE)
    assert REGISTRY.get_sample_value(*timed) == before + 1
    assert shell.fact().counts == (("workers", 1),)
    assert shell.woken > 0
    body = shell.server.workloads[BASE]
    assert (body["spec"]["queueName"], body["spec"]["priority"]) == ("gpus", 0)
    await shell.do(ASK_BASE)
    assert (shell.asked("POST workloads"), len(shell.server.workloads), shell.problem()) == (2, 1, None)


async def test_increments_are_pinned_to_the_base_and_below_all_bases(shell: QueueShell) -> None:
    shell.know()
    await shell.do(ASK_MORE)
    assert shell.server.workloads == {}, "there is no base yet"
    await shell.granted()
    await shell.do(ASK_MORE, CreateWorkload(2, (("workers", 1),), "gpus"))
    more = shell.server.workloads[MORE]
    assert more["spec"]["priority"] == -1_000_000_000
    assert more["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] == {"type": "p5"}
    assert shell.asked("GET gpus") == 1, "flavors are not read for each increment"


async def test_a_decision_that_takes_edits_asks_for_the_edited_pods(shell: QueueShell) -> None:
    before = job_body()["spec"]
    after = job_body()["spec"]
    after["replicaSpecs"][0]["template"]["spec"]["nodeSelector"] = {"pool": "b"}
    body = job_body(after, labels=QUEUED, annotations={"elastipod.io/applied": encode_applied(before)})
    shell.store.put_job(body)
    await shell.do(ASK_BASE)
    assert "nodeSelector" not in shell.server.workloads.pop(BASE)["spec"]["podSets"][0]["template"]["spec"]
    await shell.do(ASK_BASE, adopts_spec=True)
    assert shell.server.workloads[BASE]["spec"]["podSets"][0]["template"]["spec"]["nodeSelector"] == {"pool": "b"}


@pytest.mark.parametrize(
    ("answer", "reason", "said"),
    [
        ((404, "the server could not find the requested resource"), "KueueUnavailable", "install Kueue 0.15 or newer"),
        ((404, 'namespaces "team" not found'), "WorkloadRefused", 'namespaces "team" not found'),
        (AWAY, "KueueUnavailable", "Kueue does not answer the API server"),
        ((403, "forbidden: exceeded quota"), "WorkloadRefused", "exceeded quota"),
        ((422, "spec.podSets: Invalid value"), "WorkloadRefused", "spec.podSets: Invalid value"),
        ((500, "out of order"), "WorkloadRefused", "out of order"),
    ],
)
async def test_what_is_refused_is_told_and_tried_again_later(
    shell: QueueShell, later: Any, answer: tuple[int, str], reason: str, said: str
) -> None:
    shell.know()
    shell.server.refuse["create"] = answer
    await shell.do(ASK_BASE)
    problem = shell.problem()
    assert problem is not None
    assert (problem[0], said in problem[1]) == (reason, True)
    woken = shell.woken
    assert woken == 1
    await shell.do(ASK_BASE)
    assert (shell.asked("POST workloads"), shell.woken) == (1, woken), (
        "not before its time, and nobody is woken for nothing"
    )
    later(1)
    await shell.do(ASK_BASE)
    later(1)
    await shell.do(ASK_BASE)
    assert shell.asked("POST workloads") == 2, "the wait grows"
    del shell.server.refuse["create"]
    later(1)
    await shell.do(ASK_BASE)
    assert (shell.problem(), len(shell.server.workloads)) == (None, 1)


async def test_the_wait_ends_when_kueue_is_back(shell: QueueShell, later: Any) -> None:
    shell.know()
    shell.server.refuse["create"] = AWAY
    await shell.do(ASK_BASE)
    del shell.server.refuse["create"]
    woken = shell.woken
    shell.queues.retry_all()
    assert shell.woken == woken + 1
    await shell.do(ASK_BASE)
    assert shell.problem() is None


async def test_a_wish_that_is_gone_takes_its_trouble_along(shell: QueueShell) -> None:
    shell.know()
    shell.server.refuse["create"] = (403, "no")
    await shell.do(ASK_BASE)
    await shell.do()
    assert shell.problem() is None


async def test_a_missing_priority_class_is_a_reason_of_its_own(shell: QueueShell) -> None:
    shell.know(labels={**QUEUED, "kueue.x-k8s.io/priority-class": "none"})
    await shell.do(ASK_BASE)
    problem = shell.problem()
    assert problem is not None
    assert problem[0] == "PriorityClassMissing"


@pytest.mark.parametrize(
    ("owners", "words"),
    [
        ([], f"Workload {BASE} exists and does not belong to this job; delete it or rename the job"),
        (
            [{"kind": "HyperPodPyTorchJob", "name": "another", "uid": "u", "controller": True}],
            f"Workload {BASE} exists and belongs to HyperPodPyTorchJob another; create this job with another name",
        ),
    ],
)
async def test_a_strange_workload_of_that_name_is_told_of(
    shell: QueueShell, owners: list[dict[str, Any]], words: str
) -> None:
    shell.know()
    await shell.do(ASK_BASE)
    strange = shell.server.workloads[BASE]
    strange["metadata"] |= {"ownerReferences": owners, "uid": "strange"}
    shell.server.put(shell.server.workloads, strange)
    shell.job.workloads.clear()
    await shell.do(ASK_BASE)
    problem = shell.problem()
    assert problem is not None
    assert problem[1] == words
