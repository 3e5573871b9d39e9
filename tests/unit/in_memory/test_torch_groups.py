"""What is left of a process group after its generation."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from elastipod.torch_compat import detach_reducer


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
def test_the_connections_of_a_detached_model_go_with_its_group() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    model = DistributedDataParallel(nn.Linear(4, 2))
    loss = model(torch.ones(3, 4)).sum()  # kept, as the variable of a loop is
    loss.backward()
    group = weakref.ref(model.process_group)
    detach_reducer(model)
    detach_reducer(model)  # once more does no harm
    dist.destroy_process_group()
    assert group() is None, "somebody still holds the group, and a peer would wait for it"
    assert loss.requires_grad
