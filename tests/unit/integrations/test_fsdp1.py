"""FSDP1 is refused wherever a model is given to the library, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from elastipod import CheckpointManager, FrameworkError
from elastipod.fsdp1 import refuse_fsdp1
from elastipod.in_memory.world_life import WorldLife

SENTENCE = (
    r"the model is wrapped by FullyShardedDataParallel \(FSDP1\), which cannot be resumed at every world size; shard it with FSDP2 "
    r"instead: torch.distributed.fsdp.fully_shard\(model\)"
)


def wrapped() -> nn.Module:
    """Give a wrapper as it is before it shards anything, which takes no process group."""
    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)
    return model


def around(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), model)


@pytest.mark.parametrize("make", [wrapped, lambda: around(wrapped())], ids=["the model", "a part of it"])
def test_the_library_refuses_it(tmp_path: Path, make: Callable[[], nn.Module]) -> None:
    objects: dict[str, Any] = {"model": make(), "optimizer": torch.optim.SGD([torch.zeros(1)])}
    checkpoints = CheckpointManager(tmp_path / "checkpoints")
    with pytest.raises(FrameworkError, match=SENTENCE):
        checkpoints.load_latest(**objects)
    with pytest.raises(FrameworkError, match=SENTENCE):
        checkpoints.save(1, **objects)
    with pytest.raises(FrameworkError, match=SENTENCE):
        checkpoints.save_async(1, **objects)


def test_other_models_pass() -> None:
    refuse_fsdp1(around(nn.Linear(1, 1)))
    refuse_fsdp1(None)


def test_a_state_refuses_it_as_wrapper() -> None:
    life: Any = object.__new__(WorldLife)  # its part that wraps the model, without a world
    life.memory = SimpleNamespace(members=SimpleNamespace(model=nn.Linear(1, 1)))
    life._wrap, life._has_groups = lambda model: wrapped(), True
    with pytest.raises(FrameworkError, match=SENTENCE):
        life._wrap_model()
