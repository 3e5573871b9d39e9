"""What the notary makes of one rank's first step; `tests/e2e/test_inmemory.py` has mistakes in worlds of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from elastipod.checkpoint.rng import seed_new_rank
from elastipod.data import Batch, ElasticBatches
from elastipod.gradients import announce_reduced_gradients
from elastipod.in_memory.notary import Notary

PLAN = ElasticBatches(40, 8, seed=1)


def problems(
    *,
    divisor: float | None = 1.0,
    change: Callable[[nn.Module], object] = lambda model: None,
    seeds: bool = True,
    batch: Batch | None = None,
) -> list[str]:
    """Let a single rank train step 3 with two passes, and give what the notary says. change: is made after the passes."""
    torch.manual_seed(0)
    if seeds:
        seed_new_rank(3, 0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    if seeds:
        seed_new_rank(3, 0)
    notary = Notary(model, model, seed=3)
    for _ in range(2):
        model(torch.randn(4, 2)).square().sum().backward()
    change(model)
    if divisor is not None:
        announce_reduced_gradients(divisor)
    notary.close()
    announce_reduced_gradients(99.0)  # nobody listens any more
    return notary.problems(batch or PLAN.batch(3, 0, 1), PLAN, 3)


def test_a_right_step_has_no_problem() -> None:
    assert problems() == []


def test_a_wrong_divisor_is_named_with_a_parameter_and_a_rank() -> None:
    assert problems(divisor=2.0) == [
        "the reduced gradient of 0.weight is not the mean over all ranks' samples on rank 0"
    ]


def test_one_parameter_that_was_left_out_is_found() -> None:
    (said,) = problems(change=lambda model: next(iter(reversed(list(model.parameters())))).grad.zero_())  # type: ignore[union-attr]
    assert "the reduced gradient of 1.bias" in said


def test_a_gradient_that_is_not_a_number_is_left_to_the_gradscaler() -> None:
    assert problems(change=lambda model: [each.grad.fill_(torch.nan) for each in model.parameters()]) == []  # type: ignore[union-attr]


def test_a_script_that_does_not_say_when_it_has_reduced_is_checked_for_all_but_that() -> None:
    former = replace(PLAN.batch(3, 0, 1), indices=PLAN.batch(2, 0, 1).indices)
    assert problems(divisor=None) == []
    assert problems(divisor=None, batch=former) == ["the ranks' samples together are not the batch of step 3"]


def test_a_random_state_that_nobody_derived_from_the_step_is_found() -> None:
    assert problems(seeds=False) == ["the random state is not that of its step on rank 0"]
