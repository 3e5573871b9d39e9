"""Sums in a fixed order over several ranks: every rank gets the bits that one process alone gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import run_ranks, world
from torch import nn

from elastipod.data import ElasticBatches
from elastipod.gradients import observe_reduced_gradients
from elastipod.testing import fixed_order
from elastipod.testing.fixed_order import exact_sum, fixed_order_passes

SIZE, GRAIN = 22, 4  # 5 whole grains and one of 2 samples


class Told(nn.Module):
    """A model with known gradients: of ``weight`` the mean of the samples' numbers; ``unused`` gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return (self.weight * numbers[:, None]).sum() / len(numbers)


def step(rank: int, world_size: int) -> dict[str, Any]:
    """Train one step; give the gradients' bits, the weights of the passes, and the sum of their losses."""
    model, weights = Told(), []
    divisors: list[float] = []
    stop = observe_reduced_gradients(divisors.append)
    torch.manual_seed(3)
    numbers = torch.randn(SIZE) * torch.logspace(-6, 6, SIZE)
    (batch,) = ElasticBatches(SIZE, SIZE).iterate(rank, world_size, grain=GRAIN)
    model.weight.grad = torch.full((3,), 99.0)  # left over from something else
    for part in fixed_order_passes(model, batch, grain=GRAIN):
        weights.append([len(part.indices), part.weight])
        (model(numbers[list(part.indices)]) * part.weight).backward()
    stop()
    assert model.weight.grad is not None
    assert model.unused.grad is not None
    assert model.frozen.grad is None
    assert divisors == [1.0], "the gradients are those of the global batch, and it is said once"
    return {
        "bits": model.weight.grad.view(torch.int32).tolist(),
        "mean": model.weight.grad[0].item(),
        "unused": model.unused.grad.tolist(),
        "weights": weights,
        "exact": exact_sum([1e16, 1.0] if rank == 0 else [-1e16] if rank == 1 else []),
    }


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_every_rank_gets_the_bits_of_one_process(world_size: int) -> None:
    """In a world of 7, a rank has no grain at all."""
    alone = step(0, 1)
    torch.manual_seed(3)
    mean = (torch.randn(SIZE) * torch.logspace(-6, 6, SIZE)).double().mean().item()
    assert alone["mean"] == pytest.approx(mean, rel=1e-4)
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, world_size, port):
            return step(rank, world_size)

    found = run_ranks(world_size, body)
    assert [each["bits"] for each in found] == [alone["bits"]] * world_size
    assert [each["unused"] for each in found] == [[0.0]] * world_size
    assert [each["exact"] for each in found] == [1.0] * world_size
    passes = sorted(each for one in found for each in one["weights"])
    assert passes == sorted(alone["weights"])
    assert passes == [[2, 2 / SIZE], *[[4, 4 / SIZE]] * 5]


def test_a_sharded_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_order, "DTensor", nn.Parameter)
    (batch,) = ElasticBatches(SIZE, SIZE).iterate(0, 1, grain=GRAIN)
    with pytest.raises(
        ValueError, match=r"^sums in a fixed order need whole gradients on every rank; this model is sharded \(FSDP2\)$"
    ):
        next(fixed_order_passes(Told(), batch, grain=GRAIN))
