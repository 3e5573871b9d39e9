"""Loaders whose samples an integration takes over: only those that give every sample once per epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from elastipod.errors import FrameworkError
from elastipod.integrations.loaders import check_loader

DATA = TensorDataset(torch.arange(8.0).reshape(8, 1))


@pytest.mark.parametrize(
    "sampler",
    [
        None,
        SequentialSampler(DATA),
        RandomSampler(DATA),
        DistributedSampler(DATA, num_replicas=3, rank=1),
    ],
    ids=["of the loader", "sequential", "random", "distributed"],
)
def test_a_sampler_that_only_orders_or_divides_the_samples_is_replaced(sampler: Any) -> None:
    check_loader(DataLoader(DATA, batch_size=2, sampler=sampler))


def test_a_part_of_a_dataset_is_a_dataset() -> None:
    check_loader(DataLoader(Subset(DATA, range(3)), batch_size=2, shuffle=True))


@pytest.mark.parametrize(
    "sampler",
    [
        SubsetRandomSampler(range(4)),
        WeightedRandomSampler([1.0] * 8, 8),
        RandomSampler(DATA, replacement=True),
        RandomSampler(DATA, num_samples=4),
        RandomSampler(range(4)),
        SequentialSampler(range(4)),
        DistributedSampler(range(4), num_replicas=1, rank=0),  # type: ignore[arg-type]
        DistributedSampler(DATA, num_replicas=3, rank=1, drop_last=True),
        [0, 1],
    ],
    ids=[
        "subset",
        "weighted",
        "with replacement",
        "fewer",
        "random over fewer",
        "sequential over fewer",
        "distributed over fewer",
        "distributed without the last",
        "a list",
    ],
)
def test_a_sampler_that_chooses_samples_is_refused(sampler: Any) -> None:
    """The plan would train those that were held out for the validation."""
    with pytest.raises(FrameworkError, match=rf"the loader has a {type(sampler).__name__}, .*give torch's Subset"):
        check_loader(DataLoader(DATA, batch_size=2, sampler=sampler))


def test_a_batch_sampler_and_drop_last_are_refused() -> None:
    with pytest.raises(FrameworkError, match="the loader has a batch_sampler; give it batch_size"):
        check_loader(DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 2, drop_last=False)))
    with pytest.raises(FrameworkError, match="drop_last=True, but every sample is trained; leave it out"):
        check_loader(DataLoader(DATA, batch_size=2, drop_last=True))


def test_a_loop_of_accelerate_refuses_it_before_it_claims_the_directory(integration: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    steps = integration.elastic_steps(
        SimpleNamespace(distributed_type=None, gradient_accumulation_steps=1, scaler=None),
        DataLoader(DATA, batch_size=2, sampler=SubsetRandomSampler(range(4))),
        model,
        torch.optim.SGD(model.parameters()),
        global_batch=4,
        checkpoints=tmp_path / "checkpoints",
    )
    with pytest.raises(FrameworkError, match="SubsetRandomSampler"):
        next(steps)
    assert not (tmp_path / "checkpoints").exists()
