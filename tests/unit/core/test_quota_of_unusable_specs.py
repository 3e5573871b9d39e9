"""A job whose spec cannot be used any more is not looked after, but it keeps no quota that others wait for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.core.builders import NOW, acts, job, observed, pod, running, trains
from tests.unit.core.quota_builders import QUEUE, evicted, on, pending, train, workload

from elastipod_operator.core.actions import DeletePod, DeleteWorkload, FinishWorkload
from elastipod_operator.core.plan import plan
from elastipod_operator.core.snapshot import Snapshot


def unusable(workloads: list[Any], *pods: Any, **changes: Any) -> Snapshot:
    record = replace(trains(4), queue=QUEUE, **changes)
    fact = replace(
        job(record, queue=QUEUE), policy=None, spec_error="spec.elasticPolicy.minReplicas is 6 but the maximum is 4"
    )
    return observed(fact, pods, workloads=tuple(workloads))


def named(actions: list[Any]) -> list[str]:
    return [action.name for action in actions]


def test_pods_go_of_what_kueue_takes_back_and_then_the_quota() -> None:
    todo = plan(unusable([workload(0, 2), evicted(1), workload(2)], *train(2), (on(1, 2), running())))
    assert named(acts(todo, DeletePod)) == [pod(2).name]
    assert not acts(todo, DeleteWorkload), "not before its pod is gone"
    todo = plan(unusable([workload(0, 2), evicted(1), workload(2)], *train(2)))
    assert not acts(todo, DeletePod)
    assert named(acts(todo, DeleteWorkload)) == [evicted(1).name]
    assert todo.conditions[-1].type == "Running", "it trains on as far as anybody knows"


@pytest.mark.parametrize(
    "one", [workload(1), pending(1), evicted(1, is_deleting=True)], ids=["granted", "in wait", "on its way"]
)
def test_what_nobody_waits_for_is_left_alone(one: Any) -> None:
    assert plan(unusable([workload(0, 2), one], *train(2), (on(1, 2), running()))).actions == ()


def test_a_job_that_has_ended_holds_no_quota() -> None:
    ended = {"outcome": "Completed", "outcome_reason": "Completed", "ended_at": NOW}
    todo = plan(unusable([workload(0, 2), workload(1)], (on(1, 2), running()), **ended))
    assert named(acts(todo, FinishWorkload)) == [workload(0, 2).name]
