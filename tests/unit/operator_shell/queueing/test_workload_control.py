"""Calls to Kueue that fail for long, and writes to Workloads that somebody else has changed, keeps or deleted meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.kube.bodies import JOB_UID, job_body
from tests.unit.operator_shell.queueing.queue_shell import (
    ASK_BASE,
    ASK_MORE,
    BASE,
    QUEUED,
    QueueShell,
)

from elastipod_operator.core.actions import (
    DeleteWorkload,
    FinishWorkload,
    SetPodsReady,
)
from elastipod_operator.queueing.workload_control import Retry


def test_a_call_that_fails_for_weeks_is_retried_every_half_minute() -> None:
    retry = Retry()
    waits_s = [retry.note_failure() for _ in range(50_000)]
    assert waits_s[:7] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert waits_s[-1] == 30.0
    retry.reset()
    assert retry.note_failure() == 1.0


async def test_a_workload_that_is_gone_or_another_one_by_now_is_forgotten(shell: QueueShell) -> None:
    shell.know()
    fact = await shell.granted()
    shell.server.workloads[BASE]["metadata"]["uid"] = "another"
    await shell.do(DeleteWorkload(BASE, fact.uid, "a test"))
    assert BASE in shell.server.workloads
    assert shell.job.workloads.items == ()
    shell.server.workloads.clear()
    fact = await shell.granted()
    shell.server.workloads.clear()
    await shell.do(SetPodsReady(BASE, fact.uid, True, False))
    assert shell.job.workloads.items == ()


@pytest.mark.parametrize(
    "order_of",
    [lambda w: SetPodsReady(w.name, w.uid, True, False), lambda w: FinishWorkload(w.name, w.uid, True, "done")],
    ids=["mark", "finish"],
)
async def test_what_somebody_wrote_meanwhile_is_not_taken_for_gone(
    shell: QueueShell, later: Any, caplog: pytest.LogCaptureFixture, order_of: Any
) -> None:
    """Without its base the job would stop."""
    shell.know()
    fact = await shell.granted()
    shell.server.refuse["tell"] = (409, "the object has been modified")
    await shell.do(order_of(fact))
    assert shell.fact() == fact
    assert "could not be" not in caplog.text
    shell.server.refuse.clear()
    later(1)
    await shell.do(order_of(fact))
    assert shell.fact() != fact
    assert shell.asked("PATCH status") == 2


async def test_a_workload_that_somebody_keeps_is_on_its_way(shell: QueueShell) -> None:
    shell.know()
    fact = await shell.granted()
    shell.server.workloads[BASE]["metadata"]["finalizers"] = ["somebody.io/keeps"]
    await shell.do(DeleteWorkload(BASE, fact.uid, "a test"))
    assert shell.fact().is_deleting


async def test_kueue_is_told_by_a_manager_for_each_condition(shell: QueueShell) -> None:
    shell.know()
    fact = await shell.granted()
    await shell.do(SetPodsReady(BASE, fact.uid, True, False))
    assert shell.fact().pods_ready is True
    await shell.do(FinishWorkload(BASE, fact.uid, False, "it failed"))
    assert shell.fact().finished
    assert shell.fact().pods_ready is True
    assert shell.server.managers == ["elastipod-operator-PodsReady", "elastipod-operator-Finished"]


async def test_a_job_that_is_gone_is_forgotten(shell: QueueShell) -> None:
    shell.know()
    shell.server.refuse["create"] = (403, "no")
    await shell.do(ASK_BASE)
    shell.queues.forget(JOB_UID)
    shell.queues.retry_all()
    assert shell.problem() is None
    await asyncio.sleep(0)


async def test_increments_that_must_be_beside_the_base_wait_for_its_place(
    shell: QueueShell, later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait grows: the pods of a base may wait long for nodes. A pass comes at its end, whatever else wakes the job before."""
    waits: list[float] = []
    loop = asyncio.get_running_loop()
    right = loop.call_later

    def call_later(delay: float, *call: Any) -> asyncio.TimerHandle:
        waits.append(delay)
        return right(delay, *call)

    monkeypatch.setattr(loop, "call_later", call_later)
    template = {
        "metadata": {"annotations": {"kueue.x-k8s.io/podset-required-topology": "rack"}},
        "spec": {"containers": [{"name": "train", "image": "train:1"}]},
    }
    shell.store.put_job(
        job_body({"replicaSpecs": [{"name": "workers", "replicas": 2, "template": template}]}, labels=QUEUED)
    )
    await shell.granted()
    await shell.do(ASK_MORE)
    assert (set(shell.server.workloads), shell.problem()) == ({BASE}, None)
    looked = shell.asked(f"GET {BASE}")
    (first,) = waits
    for _ in range(2):
        later(first)
        await shell.do(ASK_MORE)
    assert shell.asked(f"GET {BASE}") == looked + 1
    assert waits == [first, 2 * first]
