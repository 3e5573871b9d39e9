"""Pods are created where Kueue's flavors say, on quota that is there."""

from __future__ import annotations

import pytest
from tests.unit.operator_shell.queue_server import CANNOT_CONVERT
from tests.unit.operator_shell.queueing.queue_shell import (
    ASK_BASE,
    BASE,
    CLASS,
    MORE,
    QUEUED,
    QueueShell,
)

from elastipod_operator.core.actions import (
    CreatePod,
    DeleteWorkload,
)
from elastipod_operator.core.names import ANNOTATION_WORKLOAD, PodId
from elastipod_operator.kube.api import ApiError


def create(workload: str, ordinal: int = 0) -> CreatePod:
    return CreatePod(PodId("workers", ordinal, 0), 1, workload=workload)


async def test_pods_are_placed_as_kueue_says(shell: QueueShell) -> None:
    shell.know()
    await shell.granted()
    ((order, placed),), _ = await shell.queues.place_pods(shell.job, [create(BASE)])
    assert order == create(BASE)
    assert placed is not None
    assert placed.node_selector == {"type": "p5"}
    assert placed.annotations[ANNOTATION_WORKLOAD] == BASE


async def test_no_pod_on_quota_that_is_gone_by_now(shell: QueueShell) -> None:
    """The decision rests on what the watch has shown; the API server knows better."""
    shell.know()
    await shell.granted()
    await shell.granted(1)
    shell.server.evict(BASE)
    woken = shell.woken
    ready, _ = await shell.queues.place_pods(shell.job, [create(BASE), create(MORE, 1), create("", 2)])
    assert [order.workload for order, _ in ready] == ["", MORE]
    assert shell.fact(0).eviction_reason == "Preempted"
    assert shell.woken > woken
    del shell.server.workloads[MORE]
    assert await shell.queues.place_pods(shell.job, [create(MORE, 1)]) == ([], "")
    assert [one.fact.number for one in shell.job.workloads.items] == [0]


async def test_a_clash_is_told_and_no_pod_is_made(shell: QueueShell) -> None:
    shell.know()
    await shell.granted()
    shell.server.admit(BASE, flavor="gone")
    ready, problem = await shell.queues.place_pods(shell.job, [create(BASE)])
    assert ready == []
    assert "ResourceFlavor gone" in problem
    assert shell.problem() == ("PodPlacementFailed", problem)
    shell.server.admit(BASE)
    assert len((await shell.queues.place_pods(shell.job, [create(BASE)]))[0]) == 1
    assert shell.problem() is None


async def test_a_clash_is_forgotten_with_the_quota(shell: QueueShell) -> None:
    """Why quota is not requested again must be seen then."""
    shell.know()
    base = await shell.granted()
    shell.server.admit(BASE, flavor="gone")
    await shell.queues.place_pods(shell.job, [create(BASE)])
    await shell.do(DeleteWorkload(BASE, base.uid, "suspended"))
    assert shell.problem() is None
    shell.know(labels={**QUEUED, CLASS: "nope"}, resourceVersion="901")
    await shell.do(ASK_BASE)
    problem = shell.problem()
    assert problem is not None
    assert "PriorityClass nope" in problem[1]


async def test_a_clash_is_forgotten_when_the_quota_is_taken_away(shell: QueueShell) -> None:
    shell.know()
    await shell.granted()
    shell.server.admit(BASE, flavor="gone")
    await shell.queues.place_pods(shell.job, [create(BASE)])
    shell.store.put_workload(shell.server.evict(BASE))
    assert shell.problem() is None


async def test_a_clash_is_forgotten_when_no_pod_is_wanted_any_more(shell: QueueShell) -> None:
    shell.know()
    await shell.granted()
    shell.server.admit(BASE, flavor="gone")
    await shell.queues.place_pods(shell.job, [create(BASE)])
    woken = shell.woken
    shell.queues.forget_placement(shell.job)
    assert (shell.problem(), shell.woken) == (None, woken + 1)


async def test_a_flavor_that_may_not_be_read_is_told_and_no_pod_is_made(shell: QueueShell) -> None:
    shell.know()
    await shell.granted()
    shell.server.refuse["resourceflavors/gpus"] = (403, "resourceflavors is forbidden")
    ready, problem = await shell.queues.place_pods(shell.job, [create(BASE)])
    assert (ready, problem) == ([], f"the flavors of Workload {BASE} cannot be read: resourceflavors is forbidden")
    assert shell.problem() == ("PodPlacementFailed", problem)
    shell.server.refuse["resourceflavors/gpus"] = (503, "later")
    with pytest.raises(ApiError):
        await shell.queues.place_pods(shell.job, [create(BASE)])


async def test_pods_can_be_replaced_while_kueue_is_away(shell: QueueShell) -> None:
    shell.know()
    await shell.granted()
    shell.server.refuse["read"] = CANNOT_CONVERT
    with pytest.raises(ApiError):
        await shell.queues.place_pods(shell.job, [create(BASE)])
    del shell.server.refuse["read"]
    await shell.queues.place_pods(shell.job, [create(BASE)])
    shell.server.refuse["read"] = CANNOT_CONVERT
    assert len((await shell.queues.place_pods(shell.job, [create(BASE)]))[0]) == 1
    shell.store.put_workload(shell.server.evict(BASE))
    assert await shell.queues.place_pods(shell.job, [create(BASE)]) == ([], ""), "the watch knows better"
