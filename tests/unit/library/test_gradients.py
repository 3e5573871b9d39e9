"""The accumulated, weighted gradient of any world equals the one of a single process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastipod.data import ElasticBatches
from elastipod.gradients import gradient_sync


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(inputs), targets)


@settings(deadline=None, max_examples=40)
@given(
    global_size=st.integers(1, 23), world_size=st.integers(1, 6), micro_size=st.integers(1, 8), seed=st.integers(0, 99)
)
def test_the_mean_over_ranks_is_the_gradient_of_one_process(
    global_size: int, world_size: int, micro_size: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(global_size, 5, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (global_size,), generator=generator)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    loss_of(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plan = ElasticBatches(global_size, global_size, seed=seed)
    summed = [torch.zeros_like(each) for each in expected]
    for rank in range(world_size):
        model.zero_grad()
        for part in plan.batch(1, rank, world_size).micro_batches(micro_size):
            with gradient_sync(model, part.is_last):
                chosen = list(part.indices)
                (loss_of(model, inputs[chosen], targets[chosen]) * part.weight).backward()
        for total, parameter in zip(summed, model.parameters(), strict=True):
            total += parameter.grad
    for total, wanted in zip(summed, expected, strict=True):
        torch.testing.assert_close(total / world_size, wanted, rtol=1e-10, atol=1e-13)


def test_one_unsplit_pass_per_rank_weighs_by_its_share() -> None:
    plan = ElasticBatches(dataset_size=7, global_batch=7)
    weights = [plan.batch(1, rank, 3).weight for rank in range(3)]
    assert weights == pytest.approx([3 * 2 / 7, 3 * 2 / 7, 3 * 3 / 7])
