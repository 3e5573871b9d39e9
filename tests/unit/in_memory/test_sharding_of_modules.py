"""Modules that `build` shards in another way than the rest: what is refused, and what trains."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.in_memory.test_state_over_generations import Agents, Job, patient  # noqa: F401 a fixture
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor

from elastipod import State
from elastipod.data import ElasticBatches
from elastipod.gradients import announce_reduced_gradients
from elastipod.in_memory.parts import UnknownSharding


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, inputs: torch.Tensor) -> Any:
        scale: Any = self.scale
        return self.head(self.base(inputs)) * (scale.to_local() if hasattr(scale, "to_local") else scale)


def train(build: Callable[[Any], Any], mesh: dict[str, int], reduce: Callable[[State], None]) -> int:
    state = State(build, mesh=mesh)
    for step in state.steps(ElasticBatches(8, 4)):
        with step as batch:
            (state.model(torch.ones(len(batch.indices), 4)).square().sum() * batch.weight).backward()
            reduce(state)
    return state.completed


def test_a_module_that_is_sharded_over_other_ranks_is_refused_by_name(tmp_path: Path) -> None:
    """It would be filled with the rows of other ranks, and nothing would say so where it is frozen."""

    def build(mesh: Any) -> Any:
        model = Net()
        fully_shard(model.base.requires_grad_(False))  # without mesh=, so over all ranks
        fully_shard(model, mesh=mesh)
        return model, torch.optim.SGD(model.parameters())

    def body(rank: int) -> str:
        with pytest.raises(UnknownSharding) as caught:
            train(build, {"replicate": -1, "shard": 1}, lambda state: None)
        return str(caught.value)

    told = Job(tmp_path, Agents([[0, 1]]), has_own_pods=True).run(body, 2)
    assert told == [
        f"model.base.weight is divided over ranks 0-1, and the mesh of State divides over rank {rank}; pass the mesh that build gets as "
        "mesh= to every fully_shard"
        for rank in (0, 1)
    ]


def test_a_trained_parameter_that_is_whole_on_the_mesh_trains(tmp_path: Path) -> None:
    """The script reduces its gradient; the notary has no say in it."""

    def build(mesh: Any) -> Any:
        model = Net()
        model.scale = nn.Parameter(distribute_tensor(model.scale.data, mesh, [Replicate()]))
        fully_shard(model, mesh=mesh, ignored_params={model.scale})
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def reduce(state: State) -> None:
        gradient: Any = state.model.scale.grad
        torch.distributed.all_reduce(gradient.to_local())
        gradient.to_local().div_(state.world_size)
        announce_reduced_gradients(state.world_size)

    told = Job(tmp_path, Agents([[0, 1]]), has_own_pods=True).run(lambda rank: train(build, {"shard": -1}, reduce), 2)
    assert told == [2, 2]


def test_groups_of_every_sharded_member_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastipod.in_memory import sharded_memory

    released: list[nn.Module] = []
    monkeypatch.setattr(sharded_memory, "release_shard_groups", released.append)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    built: list[nn.Module] = []

    def build(mesh: Any) -> Any:
        model, other = Net(), Net()
        built.extend([model, other])
        for each in built:
            fully_shard(each, mesh=mesh)
        return {"model": model, "disc": other, "optimizer": torch.optim.SGD(model.parameters())}

    state = State(build, mesh={"shard": -1})
    for step in state.steps(ElasticBatches(8, 4)):
        with step as batch:
            state.model(torch.ones(len(batch.indices), 4)).sum().backward()
        state._world.memory.release()
        break
    assert released == built
    assert os.environ.get("RANK") is None
