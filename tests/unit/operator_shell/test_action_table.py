"""Every action has a step that carries it out."""

from __future__ import annotations

from typing import get_args

from tests.unit.core.builders import trains

from elastipod_operator.action_table import STEP_OF, Step, has_actions
from elastipod_operator.core.actions import Action, ListPods, Plan


def test_every_action_has_a_step_and_every_step_has_actions() -> None:
    assert set(STEP_OF) == set(get_args(Action))
    assert set(STEP_OF.values()) == set(Step)


def test_a_step_has_something_to_do_when_the_plan_has_one_of_its_actions() -> None:
    todo = Plan(record=trains(2), actions=(ListPods(),))
    assert [step for step in Step if has_actions(step, todo)] == [Step.LIST_PODS]
