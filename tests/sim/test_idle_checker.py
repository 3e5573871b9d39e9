"""Mistakes by which a job would rest for ever, planted one at a time: the watch over operators at rest must find each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.sim.failures import failure_of
from tests.sim.invariant_state import Violation
from tests.sim.scripted_queue_schedules import QUEUE_SCHEDULES
from tests.sim.scripted_schedules import SCHEDULES

from elastipod_operator import reconcile_pass
from elastipod_operator.core import plan as planning
from elastipod_operator.core import pod_supply
from elastipod_operator.core.context import PlanDraft
from elastipod_operator.reconciler import Reconciler

WITHOUT_TIME = "without a time to look again"
FIND_SOMETHING = "a look would find something to do"
SCHEDULE_OF = {
    "WaitingForPods": "nothing happens",
    "Resizing": "a second node is drained during the first drain",
    "Recovering": "a node loses power",
}


@pytest.mark.parametrize("reason", SCHEDULE_OF)
def test_a_forgotten_time_to_look_again_is_found(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = planning.plan

    def forgetful(seen: Any) -> Any:
        todo = real(seen)
        return replace(todo, wake_at=None) if todo.conditions[-1].reason == reason else todo

    monkeypatch.setattr(reconcile_pass, "plan", forgetful)
    found = failure_of(SCHEDULES[SCHEDULE_OF[reason]])
    assert isinstance(found, Violation)
    assert WITHOUT_TIME in str(found) or FIND_SOMETHING in str(found)


def test_a_wait_for_pods_whose_end_the_watch_may_miss_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (planning, pod_supply):
        monkeypatch.setattr(module, "list_while_leaving", lambda step, *_: step)
    found = failure_of(QUEUE_SCHEDULES["the watch misses the end of the pods after somebody deleted the base"])
    assert isinstance(found, Violation)
    assert WITHOUT_TIME in str(found)


def test_a_growth_window_that_ends_unseen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., PlanDraft] = planning._train

    def without_time(*given: Any) -> PlanDraft:
        step = real(*given)
        return replace(step, wake_at=None) if step.record.window_since is not None else step

    monkeypatch.setattr(planning, "_train", without_time)
    found = failure_of(SCHEDULES["nodes come one after the other"])
    assert isinstance(found, Violation)
    assert WITHOUT_TIME in str(found) or FIND_SOMETHING in str(found)


async def _fail(*_: Any) -> None:
    raise KeyError("a mistake in the handling of a failure")


def test_a_task_that_dies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reconciler, "_report_failed_pass", _fail)
    found = failure_of(SCHEDULES["answers get lost from the beginning"])
    assert isinstance(found, Violation)
    assert "KeyError" in str(found)


def test_a_dead_task_that_is_not_replaced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reconciler, "_report_failed_pass", _fail)
    monkeypatch.setattr(Reconciler, "_task_ended", lambda *_: None)
    found = failure_of(SCHEDULES["answers get lost from the beginning"])
    assert isinstance(found, Violation)
    assert "nobody cares for the job" in str(found)
