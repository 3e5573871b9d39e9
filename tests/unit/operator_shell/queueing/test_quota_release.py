"""Quota is given back, and never while a pod lives on it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import REGISTRY
from tests.unit.agents.fake_agent import until
from tests.unit.kube.bodies import JOB_UID
from tests.unit.operator_shell.queue_server import AWAY
from tests.unit.operator_shell.queueing.queue_shell import (
    ASK_BASE,
    BASE,
    QueueShell,
    living,
)

from elastipod_operator import metrics
from elastipod_operator.core.actions import (
    CreateWorkload,
    DeleteWorkload,
    FinishWorkload,
    ReleaseBaseQuota,
    SetPodsReady,
)
from elastipod_operator.core.names import workload_name
from elastipod_operator.core.snapshot import ObservedWorkload
from elastipod_operator.queueing.workload_control import MAX_PARALLEL_CALLS

GIVERS = [
    pytest.param(lambda w: DeleteWorkload(w.name, w.uid, "a test"), id="drop"),
    pytest.param(lambda w: ReleaseBaseQuota(w.name, w.uid), id="release"),
    pytest.param(lambda w: FinishWorkload(w.name, w.uid, True, "done"), id="finish"),
]


@pytest.mark.parametrize("order_of", GIVERS)
@pytest.mark.parametrize(
    ("ordinal", "workload"), [pytest.param(7, BASE, id="made for it"), pytest.param(0, "", id="in its slot")]
)
async def test_nothing_is_given_back_while_a_pod_lives(
    shell: QueueShell, later: Any, order_of: Any, ordinal: int, workload: str
) -> None:
    shell.know()
    await shell.granted()
    shell.store.put_workload(shell.server.evict(BASE))
    living(shell, ordinal, workload)
    before = shell.server.workloads[BASE]["metadata"]["resourceVersion"]
    await shell.do(order_of(shell.fact()))
    assert shell.server.workloads[BASE]["metadata"]["resourceVersion"] == before
    assert shell.asked("GET pods") == 1
    assert len(shell.job.pods) == 1, "the next decision sees it"
    living(shell, ordinal, workload, "Succeeded")
    await shell.do(order_of(shell.fact()))
    found = shell.server.workloads.get(BASE)
    assert found is None or found["metadata"]["resourceVersion"] != before


async def test_what_waits_goes_whatever_lives_in_its_slots(shell: QueueShell) -> None:
    shell.know()
    await shell.do(ASK_BASE)
    living(shell, 0, BASE)
    await shell.do(DeleteWorkload(BASE, shell.fact().uid, "a test"))
    assert shell.server.workloads == {}


async def test_one_that_cannot_be_given_back_does_not_keep_the_others(shell: QueueShell, later: Any) -> None:
    shell.know()
    await shell.granted()
    more = await shell.granted(1)
    shell.store.put_workload(shell.server.evict(BASE))
    shell.server.refuse["release"] = (409, "the object has been modified")
    orders = (ReleaseBaseQuota(BASE, shell.fact().uid), DeleteWorkload(more.name, more.uid, "a test"))
    await shell.do(*orders)
    assert set(shell.server.workloads) == {BASE}
    shell.server.refuse["release"] = AWAY
    later(1)
    await shell.do(orders[0])
    assert shell.asked("PATCH status") == 2


class Calls:
    """Lets the calls of one kind through, and notes how many are under way at the same time."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.made = self.under_way = self.most = 0

    async def __call__(self, *arguments: Any) -> Any:
        self.made += 1
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await asyncio.sleep(0)
            return await self._call(*arguments)
        finally:
            self.under_way -= 1


async def many(shell: QueueShell) -> list[ObservedWorkload]:
    """Have a job that holds quota for more shares than calls are made at a time."""
    shell.know()
    await shell.granted()
    numbers = range(1, 3 * MAX_PARALLEL_CALLS)
    await shell.do(*(CreateWorkload(number, (("workers", 1),), "gpus") for number in numbers))
    for number in numbers:
        shell.store.put_workload(shell.server.admit(workload_name("job", JOB_UID, number)))
    return [one.fact for one in shell.job.workloads.items]


async def test_what_a_job_holds_is_given_back_side_by_side(shell: QueueShell, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = await many(shell)
    api = shell.queues._workloads.api
    monkeypatch.setattr(api, "delete_workload", calls := Calls(api.delete_workload))
    await shell.do(*(DeleteWorkload(fact.name, fact.uid, "a test") for fact in facts))
    assert shell.server.workloads == {}
    assert (calls.made, calls.most) == (len(facts), MAX_PARALLEL_CALLS)


async def test_pods_are_told_of_side_by_side_and_one_that_is_refused_keeps_no_other(
    shell: QueueShell, later: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = await many(shell)
    api = shell.queues._workloads.api
    monkeypatch.setattr(api, "apply_workload_status", calls := Calls(api.apply_workload_status))
    shell.server.workloads[facts[0].name]["metadata"]["uid"] = "another"
    await shell.do(*(SetPodsReady(fact.name, fact.uid, True, False) for fact in facts))
    assert [one.fact.pods_ready for one in shell.job.workloads.items] == [None, *[True] * (len(facts) - 1)]
    assert calls.most == MAX_PARALLEL_CALLS


async def test_while_kueue_is_away_the_others_are_not_tried_in_vain(shell: QueueShell) -> None:
    facts = await many(shell)
    shell.server.refuse["delete"] = AWAY
    await shell.do(*(DeleteWorkload(fact.name, fact.uid, "a test") for fact in facts))
    assert 1 <= len([call for call in shell.server.calls if call[0] == "DELETE"]) <= MAX_PARALLEL_CALLS


async def test_pods_of_other_shares_do_not_matter(shell: QueueShell) -> None:
    shell.know()
    await shell.granted()
    more = await shell.granted(1)
    living(shell, 0, BASE)
    await shell.do(DeleteWorkload(more.name, more.uid, "a test"))
    assert set(shell.server.workloads) == {BASE}
    assert [one.fact.number for one in shell.job.workloads.items] == [0]


async def test_what_others_wait_for_is_given_back_first(shell: QueueShell, caplog: pytest.LogCaptureFixture) -> None:
    shell.know()
    await shell.granted()
    waits = workload_name("job", JOB_UID, 1)
    await shell.do(CreateWorkload(1, (("workers", 1),), "gpus"))
    evicted = (await shell.granted(2)).name
    shell.store.put_workload(shell.server.evict(evicted))
    caplog.set_level("INFO")
    facts = [shell.fact(number) for number in (1, 0, 2)]
    await shell.do(*(FinishWorkload(fact.name, fact.uid, True, "done") for fact in facts))
    told = [record.workload for record in caplog.records if record.message == "quota returned"]  # type: ignore[attr-defined]
    assert told == [evicted, BASE, waits]


async def test_a_job_is_looked_at_once_for_all_who_wait(shell: QueueShell) -> None:
    shell.know()
    control = shell.queues._workloads
    control.wake_later(shell.job, 60)
    first = shell.next_gang_check()
    control.wake_later(shell.job, 90)
    assert shell.next_gang_check() is first, "that comes early enough"
    control.wake_later(shell.job, 0)
    assert first is not None
    assert first.cancelled()
    await until(lambda: shell.woken == 1)
    control.wake_later(shell.job, 60)
    second = shell.next_gang_check()
    shell.server.refuse["create"] = AWAY
    await shell.do(ASK_BASE)
    assert shell.next_gang_check() is second, "what failed has a time of its own"
    await until(lambda: shell.woken == 3)  # for the problem, and a second later to try again


async def test_a_released_base_is_in_the_queue_again(shell: QueueShell) -> None:
    shell.know()
    await shell.granted()
    shell.store.put_workload(shell.server.evict(BASE))
    await shell.do(ReleaseBaseQuota(BASE, shell.fact().uid))
    fact = shell.fact()
    assert (fact.reserved, fact.admitted, fact.eviction_reason, fact.pods_ready) == (False, False, "", False)
    assert "admission" not in shell.server.workloads[BASE]["status"]


async def test_a_release_rests_on_what_stands_there_now(shell: QueueShell) -> None:
    """What the watch showed is old by now: another look tells that there is nothing to release."""
    shell.know()
    await shell.granted()
    evicted = shell.server.evict(BASE)
    shell.store.put_workload(evicted)
    uid = shell.fact().uid
    shell.server.admit(BASE)
    await shell.do(ReleaseBaseQuota(BASE, uid))
    assert shell.asked("PATCH status") == 0
    assert shell.fact().admitted
    del shell.server.workloads[BASE]
    shell.store.put_workload(shell.server.put({}, evicted))
    await shell.do(ReleaseBaseQuota(BASE, uid))
    assert shell.job.workloads.items == ()


async def test_a_base_that_cannot_be_released_is_deleted_in_the_end(shell: QueueShell, later: Any) -> None:
    shell.know()
    await shell.granted()
    shell.store.put_workload(shell.server.evict(BASE))
    order = ReleaseBaseQuota(BASE, shell.fact().uid)
    for answer in (AWAY, (409, "modified"), (422, "refused"), (500, "panic"), AWAY, (422, "refused")):
        shell.server.refuse["release"] = answer
        later(60)
        await shell.do(order)
        assert BASE in shell.server.workloads
    later(60)
    await shell.do(order)
    assert shell.server.workloads == {}
    assert shell.job.workloads.items == ()


async def test_what_fails_is_tried_again_later_and_ends_no_pass(shell: QueueShell, later: Any) -> None:
    shell.know()
    fact = await shell.granted()
    shell.server.refuse |= {"delete": (500, "out of order"), "tell": AWAY}
    orders = (DeleteWorkload(BASE, fact.uid, "a test"), SetPodsReady(BASE, fact.uid, True, False))
    await shell.do(*orders)
    await shell.do(*orders)
    assert (shell.asked(f"DELETE {BASE}"), shell.asked("PATCH status")) == (1, 1)
    shell.server.refuse = {}
    later(1)
    await shell.do(*orders)
    assert shell.server.workloads == {}


async def test_quota_that_may_not_be_given_back_is_told_until_it_was(shell: QueueShell, later: Any) -> None:
    shell.know()
    fact = await shell.granted()
    order = DeleteWorkload(BASE, fact.uid, "a test")
    told = []
    for answer in (AWAY, (500, "panic"), (403, "forbidden"), (500, "panic")):
        shell.server.refuse["delete"] = answer
        later(60)
        await shell.do(order)
        told.append(shell.queues.snapshot(shell.job).quota_return_error)
    refused = "the job's quota could not be returned: forbidden"
    assert told == ["", "", refused, refused]
    assert shell.problem() is None, "that is no reason for which quota is not asked for"
    shell.server.refuse.clear()
    del shell.server.workloads[BASE]  # somebody else did it
    await shell.do()
    assert shell.queues.snapshot(shell.job).quota_return_error == ""


async def test_quota_that_should_be_back_is_counted(shell: QueueShell, later: Any) -> None:
    metrics.export_leading()

    def late() -> float | None:
        shell.queues.snapshot(shell.job)
        return REGISTRY.get_sample_value("elastipod_quota_evictions_overdue")

    shell.know()
    await shell.granted()
    shell.store.put_workload(shell.server.evict(BASE))
    later(60)
    assert late() == 0.0, "its workers save, and its pods go"
    later(10_000)
    assert late() == 1.0
    await shell.do(DeleteWorkload(BASE, shell.fact().uid, "it is over"))
    assert late() == 0.0
