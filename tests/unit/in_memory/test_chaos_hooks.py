"""Faults that are planned inside passes happen there: in the order of a training step, at its rank and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.nonempty import every
from tests.unit.in_memory.models import build

from elastipod import chaos
from elastipod.chaos import FaultKind, Moment, PlannedFault, plan_faults
from elastipod.in_memory import chaos_hooks
from elastipod.in_memory.chaos_hooks import ChaosHooks
from elastipod.in_memory.members import Members

Reached = list[tuple[Moment, int, int]]


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> Reached:
    moments: Reached = []
    monkeypatch.setattr(chaos, "_planned", None)
    monkeypatch.setattr(chaos_hooks, "reached", lambda at, *, rank, step: moments.append((at, rank, step)))
    return moments


def train(members: Members, note: Callable[[Moment], object], hooks: ChaosHooks, step: int) -> None:
    hooks.begin(2, step)
    loss = members.model(torch.eye(4, 3)).square().sum()
    note(Moment.APPLY)  # between the passes
    loss.backward()


@pytest.mark.parametrize(
    ("planned", "expected"),
    [
        ([], ["step", "apply"]),
        ([Moment.FORWARD], ["step", "forward", "apply"]),
        ([Moment.BACKWARD], ["step", "apply", "backward"]),
        ([Moment.COLLECTIVE], ["step", "apply", "collective"]),
        ([Moment.FORWARD, Moment.BACKWARD, Moment.COLLECTIVE], ["step", "forward", "apply", "collective", "backward"]),
    ],
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_hooks_are_there_for_the_moments_that_are_planned(
    reached: Reached, monkeypatch: pytest.MonkeyPatch, planned: list[Moment], expected: list[str], is_sharded: bool
) -> None:
    """The gradient of the last parameters comes first: their reduction is under way during the rest of the pass."""
    monkeypatch.setattr(chaos_hooks, "is_sharded", lambda model: is_sharded)
    plan_faults([PlannedFault(FaultKind.KILL, at) for at in planned])
    members = Members(build())
    hooks = ChaosHooks(members)
    for step in (7, 8):
        reached.clear()
        train(members, lambda at, step=step: reached.append((at, 2, step)), hooks, step)  # type: ignore[misc]
        assert every(each[1:] == (2, step) for each in reached)
        said = [str(each[0]) for each in reached]
        if is_sharded and planned and planned != [Moment.FORWARD]:
            # A sharded model passes both moments when its output gets its gradient.
            assert said == [*expected[: expected.index("apply") + 1], "backward", "collective"]
        else:
            assert said == expected


def test_a_sharded_model_that_is_only_evaluated_is_left_alone(
    reached: Reached, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_hooks, "is_sharded", lambda model: True)
    plan_faults([PlannedFault(FaultKind.KILL, Moment.BACKWARD)])
    members = Members(build())
    ChaosHooks(members)
    with torch.no_grad():
        members.model(torch.eye(4, 3))
    assert reached == []


def test_a_parameter_that_is_not_trained_gets_no_hook(reached: Reached) -> None:
    plan_faults([PlannedFault(FaultKind.KILL, at) for at in (Moment.BACKWARD, Moment.COLLECTIVE)])
    built: dict[str, Any] = build()
    *_, last = built["model"].parameters()
    first = next(iter(built["model"].parameters()))
    for frozen in (first, last):
        frozen.requires_grad_(False)
    members = Members(built)
    train(members, lambda at: None, ChaosHooks(members), 1)
    assert {each[0] for each in reached} == {Moment.STEP, Moment.BACKWARD, Moment.COLLECTIVE}


def test_the_first_and_the_last_parameter_tell_where_a_pass_is(reached: Reached) -> None:
    """The first one gets its gradient last, when there is nothing left to compute. Of a single one there are both moments."""
    plan_faults([PlannedFault(FaultKind.KILL, at) for at in (Moment.BACKWARD, Moment.COLLECTIVE)])
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(3)))
    single = torch.nn.Linear(1, 1, bias=False)
    for each in (model, single):
        ChaosHooks(Members({"model": each, "optimizer": torch.optim.SGD(each.parameters(), lr=0.1)}))
    model(torch.ones(1, 1)).sum().backward()
    assert [str(at) for at, *_ in reached] == ["collective", "backward"]
    reached.clear()
    model[0](torch.ones(1, 1)).sum().backward()
    assert [str(at) for at, *_ in reached] == ["backward"], "the first is enough"
    reached.clear()
    single(torch.ones(1, 1)).sum().backward()
    assert {str(at) for at, *_ in reached} == {"collective", "backward"}
