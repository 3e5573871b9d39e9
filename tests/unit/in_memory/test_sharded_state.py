"""`elastipod.State` with a mesh, in one process; `tests/e2e/test_inmemory_sharded.py` has worlds of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import elastipod
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.shard_copies import ShardCopies


def build(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(state: elastipod.State) -> list[float]:
    losses = []
    for step in state.steps(elastipod.ElasticBatches(12, 2)):
        with step as batch:
            loss = state.model(torch.ones(len(batch.indices), 4)).square().sum()
            loss.backward()
        losses.append(float(loss.detach()))
    return losses


def test_a_single_process_trains_and_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    losses = train(elastipod.State(build, mesh={"shard": -1}, checkpoints=tmp_path, checkpoint_every=2))
    assert len(losses) == 6
    assert len(set(losses)) == 6, "each step changes the weights"
    again = elastipod.State(build, mesh={"shard": -1}, checkpoints=tmp_path)
    assert train(again) == []
    assert again.completed == 6


def test_no_limit_runs_while_python_looks_through_what_the_script_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes seconds for some millions of objects, and more on a busy machine. What is frozen then is not looked through again."""
    limits: list[float | None] = []
    state = elastipod.State(build, mesh={"shard": -1})
    monkeypatch.setattr("elastipod.in_memory.sharded_memory.gc.collect", lambda: limits.append(state._limit._until))
    train(state)
    assert limits == [None], "once, as the first world is built"


def test_a_peer_that_is_lost_while_a_step_is_copied_does_not_take_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(_: ShardCopies, step: int, *__: object) -> list[Any]:
        if step == 3:
            raise RuntimeError("Connection closed by peer")
        return []

    monkeypatch.setattr(ShardCopies, "take", take)
    state = elastipod.State(build, mesh={"shard": -1}, copies=elastipod.Copies(1 << 20))
    with pytest.raises(WorldLost, match="the shards of step 3 could not be copied"):
        train(state)
    assert state.completed == 3
    assert not state._optimizers.has_run, "no step is torn"


def test_members_are_asked_for_inside_of_the_loop_only() -> None:
    state = elastipod.State(build, mesh={"shard": -1})
    with pytest.raises(AttributeError, match="built when its first world begins"):
        _ = state.model


def test_mesh_and_wrap_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="mesh and wrap exclude each other"):
        elastipod.State(build, mesh={"shard": -1}, wrap=nn.Sequential)


def test_an_optimizer_of_parameters_that_are_not_sharded_is_refused() -> None:
    def too_early(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        fully_shard(model, mesh=mesh)
        return model, optimizer

    with pytest.raises(TypeError, match="make the optimizer after fully_shard"):
        train(elastipod.State(too_early, mesh={"shard": -1}))
