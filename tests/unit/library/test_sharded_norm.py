"""The norm of an optimizer's moments where they are sharded: each element counts once, however many ranks hold it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from elastipod import collectives, torch_compat
from elastipod.audit.moments import optimizer_norm


class Placed:
    """A tensor that is placed on a mesh of 2 x 3 x 5 ranks. values: those that this rank has."""

    def __init__(self, values: list[float], *placements: Any) -> None:
        self.placements = placements
        self.device_mesh = SimpleNamespace(size=(2, 3, 5).__getitem__)
        self._values = values

    def to_local(self) -> torch.Tensor:
        return torch.tensor(self._values)


def optimizer(*moments: Any) -> Any:
    return SimpleNamespace(state={number: state for number, state in enumerate(moments)})


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have what is placed taken for sharded, and all ranks together ten times what this one has."""
    asked: list[float] = []

    def sum_over_ranks(own: float) -> float:
        asked.append(own)
        return 10 * own

    monkeypatch.setattr(torch_compat, "DTensor", Placed)
    monkeypatch.setattr(collectives, "sum_over_ranks", sum_over_ranks)
    return asked


def test_plain_moments_are_those_of_this_rank_alone(told: list[float]) -> None:
    one = optimizer(
        {"exp_avg": torch.tensor([2.0, 0.0]), "exp_avg_sq": torch.tensor(1.0), "step": torch.tensor(7.0)}, {}
    )
    assert optimizer_norm(one) == 5**0.5
    assert optimizer_norm(optimizer()) == 0.0
    assert told == [], "nobody is asked"


@pytest.mark.parametrize(
    ("placements", "copies"),
    [
        ((Shard(0), Shard(0), Shard(1)), 1),
        ((Replicate(), Shard(0), Shard(1)), 2),
        ((Replicate(), Shard(0), Replicate()), 10),
        ((Replicate(), Replicate(), Replicate()), 30),
    ],
)
def test_an_element_of_a_sharded_moment_counts_once(
    told: list[float], placements: tuple[Any, ...], copies: int
) -> None:
    one = optimizer({"exp_avg": Placed([3.0, 4.0], *placements)}, {"exp_avg": Placed([5.0], *placements)})
    assert optimizer_norm(one) == pytest.approx((10 * 50 / copies) ** 0.5)
    assert told == [pytest.approx(50 / copies)], "all of it in one sum"


def test_what_every_rank_has_is_not_summed_with_what_is_sharded(told: list[float]) -> None:
    one = optimizer({"exp_avg": Placed([3.0], Shard(0), Shard(0), Shard(0)), "exp_avg_sq": torch.tensor([6.0])})
    assert optimizer_norm(one) == pytest.approx((36 + 90) ** 0.5)
    assert told == [9.0]


def test_squares_are_summed_with_the_precision_of_float64() -> None:
    one = optimizer({"exp_avg": torch.tensor([1.0, 3e-9]), "exp_avg_sq": torch.tensor([2.0], dtype=torch.bfloat16)})
    assert optimizer_norm(one) == (5.0 + float(torch.tensor(3e-9)) ** 2) ** 0.5
    big = optimizer({"exp_avg": torch.full((2,), 1e30)})
    assert optimizer_norm(big) == pytest.approx(2**0.5 * 1e30)


def test_complex_moments_count_with_both_parts() -> None:
    moment = torch.tensor([3 + 4j, 12j], dtype=torch.complex64)
    assert optimizer_norm(optimizer({"exp_avg": moment, "exp_avg_sq": torch.zeros(2, dtype=torch.complex64)})) == 13.0
