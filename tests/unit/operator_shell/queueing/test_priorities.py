"""Priorities that were edited reach the Workloads."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.operator_shell.queueing.queue_shell import (
    ASK_MORE,
    BASE,
    CLASS,
    QUEUED,
    QueueShell,
)

from elastipod_operator.core.actions import (
    UpdateWorkloadPriority,
)


def ranks(shell: QueueShell) -> dict[int, tuple[int, Any]]:
    """Give priority and class of each Workload as the API server has them."""
    found = {}
    for body in shell.server.workloads.values():
        named = (body["spec"].get("priorityClassRef") or {}).get("name")
        found[int(body["metadata"]["labels"]["elastipod.io/share"])] = (body["spec"]["priority"], named)
    return found


async def rank_all(shell: QueueShell) -> None:
    """Do what a decision would have done about the priorities that are seen to differ."""
    wrong = [w for w in shell.queues.snapshot(shell.job).workloads if w.has_outdated_priority]
    await shell.do(*(UpdateWorkloadPriority(w.name, w.uid) for w in wrong))


async def test_an_edited_class_reaches_the_base_and_then_the_increments(shell: QueueShell) -> None:
    for name, value in (("low", 10), ("high", 1000)):
        shell.server.objects[f"workloadpriorityclasses/{name}"] = {"metadata": {"name": name}, "value": value}
    shell.know(labels={**QUEUED, CLASS: "low"})
    await shell.granted()
    await shell.do(ASK_MORE)
    assert ranks(shell) == {0: (10, "low"), 1: (-999_999_990, None)}
    assert not any(w.has_outdated_priority for w in shell.queues.snapshot(shell.job).workloads)
    shell.know(labels={**QUEUED, CLASS: "high"}, version=99)
    await rank_all(shell)
    assert ranks(shell) == {0: (1000, "high"), 1: (-999_999_990, None)}
    await rank_all(shell)
    assert ranks(shell) == {0: (1000, "high"), 1: (-999_999_000, None)}
    assert not any(w.has_outdated_priority for w in shell.queues.snapshot(shell.job).workloads)
    shell.know(labels={**QUEUED, CLASS: "none"}, version=100)
    await rank_all(shell)
    assert shell.problem() == (
        "PriorityClassMissing", "WorkloadPriorityClass none, which label kueue.x-k8s.io/priority-class names, does not exist",
    )  # fmt: skip
    shell.know(labels={**QUEUED, CLASS: "high"}, version=101)
    await rank_all(shell)
    assert shell.problem() is None
    assert ranks(shell) == {0: (1000, "high"), 1: (-999_999_000, None)}


async def test_a_priority_that_is_refused_is_tried_again_later(
    shell: QueueShell, later: Any, caplog: pytest.LogCaptureFixture
) -> None:
    shell.know()
    first = await shell.granted()
    shell.server.refuse["patch"] = (403, "workloads is forbidden")
    for _ in range(2):
        await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert caplog.text.count("a priority could not be changed") == 1
    refused = "the API server refuses the edited priority: workloads is forbidden"
    assert shell.problem() == ("PriorityRefused", refused)
    later(5)
    caplog.set_level("WARNING")
    shell.server.refuse["patch"] = (409, "the object has been modified")
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert caplog.text.count("a priority could not be changed") == 1, "nobody need be told of that"
    assert shell.fact() == first, "without its base the job would stop"
    assert shell.asked(f"PATCH {BASE}") == 2
    shell.server.refuse.clear()
    later(60)
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert shell.asked(f"PATCH {BASE}") == 3
    shell.server.workloads.clear()
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert shell.job.workloads.items == ()


async def test_a_priority_that_is_changed_back_is_told(shell: QueueShell, later: Any) -> None:
    shell.know()
    first = await shell.granted()
    shell.server.keeps = {"priority": 3}
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert shell.problem() == ("PriorityRefused", f"another client reverts the priority of Workload {BASE}")
    shell.server.keeps = {}
    later(5)
    await shell.do(UpdateWorkloadPriority(BASE, first.uid))
    assert shell.problem() is None
