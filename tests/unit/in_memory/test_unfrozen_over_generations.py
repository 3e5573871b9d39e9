"""Layers that a script unfreezes in the course of a training stay so in the next generation, whoever builds the model again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.in_memory.forked_ranks import run_ranks
from tests.unit.in_memory.test_state_over_generations import (
    DATA,
    OVER_AT,
    PLAN,
    Agents,
    Job,
    end_when_reduced,
    patient,  # noqa: F401 a fixture
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from elastipod import State

OPTIONS: dict[str, dict[str, Any]] = {
    "replicated": {"wrap": DistributedDataParallel},
    "sharded": {"mesh": {"shard": -1}},
}


def build(mesh: Any = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    if mesh is not None:
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(folder: Path, kind: str) -> list[Any]:
    """Train the plan; give the layers that are trained at the first step of each generation, and the weights before the last step."""
    state = State(build, **OPTIONS[kind])
    seen: list[list[Any]] = []
    weights: list[float] = []
    for step in state.steps(PLAN):
        with step as batch:
            model: Any = getattr(state.model, "module", state.model)  # without DDP
            if not seen or seen[-1][0] != state.generation:
                seen.append([state.generation, *(each.weight.requires_grad for each in model)])
            if batch.step == PLAN.total_steps:
                whole = [each.full_tensor() if kind == "sharded" else each for each in model.parameters()]
                weights = torch.cat([each.detach().flatten() for each in whole]).tolist()
            (state.model(DATA[list(batch.indices)]).square().mean() * batch.weight).backward()
            if batch.step == OVER_AT:
                model[0].requires_grad_(True)
            end_when_reduced(folder, state, batch.step)
    return [seen, weights]


@pytest.mark.parametrize("kind", OPTIONS)
def test_layers_that_were_unfrozen_are_trained_by_all_ranks_of_the_next_generation(tmp_path: Path, kind: str) -> None:
    ((_, expected),) = run_ranks(1, lambda _: train(tmp_path, kind))
    job = Job(tmp_path, Agents([[0, 1], [1, 0, 2]]), has_own_pods=True)
    survivor, other, newcomer = job.run(lambda _: train(tmp_path, kind), 3)
    assert survivor[0] == other[0] == [[1, False, True], [2, True, True]]
    assert newcomer[0] == [[2, True, True]]
    for _, weights in (survivor, other, newcomer):
        assert weights == pytest.approx(expected, rel=1e-3, abs=1e-5)
