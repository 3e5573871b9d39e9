"""`elastipod.State` with a mesh, in one process; `tests/e2e/test_inmemory_sharded.py` has worlds of several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import elastipod
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.parts import UnknownSharding
from elastipod.in_memory.shard_copies import ShardCopies


def build(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(state: elastipod.State, in_step: Callable[[int], None] = lambda step: None) -> list[float]:
    losses = []
    for step in state.steps(elastipod.ElasticBatches(12, 2)):
        with step as batch:
            in_step(batch.step)
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


class Factored(torch.optim.SGD):
    """Keeps something of each parameter that is placed as a test says, from its third step on."""

    def __init__(self, parameters: Any, placements: list[Placement]) -> None:
        super().__init__(parameters, lr=0.01)
        self._placements, self._steps = placements, 0

    def step(self, closure: Any = None) -> Any:
        self._steps += 1
        super().step(closure)
        for group in self.param_groups if self._steps > 2 else ():
            for parameter in group["params"]:
                factor = DTensor.from_local(torch.ones(2), parameter.device_mesh, self._placements)
                self.state[parameter]["factor"] = factor


def build_factored(placements: list[Placement], mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = build(mesh)
    return model, Factored(model.parameters(), placements)


@pytest.mark.parametrize(
    ("mesh", "placements", "saved"),
    [
        ({"replicate": -1, "shard": 1}, [Shard(0), Replicate()], 3),
        pytest.param({"shard": -1}, [Partial()], None, id="no checkpoint can have it either"),
    ],
)
def test_an_optimizer_whose_state_cannot_move_ends_the_training_with_a_checkpoint(
    tmp_path: Path,
    mesh: dict[str, int],
    placements: list[Placement],
    saved: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = elastipod.State(partial(build_factored, placements), mesh=mesh, checkpoints=tmp_path)
    with pytest.raises(UnknownSharding, match=r"optimizer\.state\.0\.factor is placed as "):
        train(state)
    assert state.completed == 3, "the step after which the optimizer had it"
    assert ("step 3 could not be saved" in caplog.text) is (saved is None)
    assert len(list(tmp_path.glob("step-*"))) == (saved is not None)


def test_parameter_groups_that_build_does_not_make_end_the_training_with_a_checkpoint(tmp_path: Path) -> None:
    """build() runs again in the next world, and has nothing that their part of the state could be put into."""

    def build_for_weights(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, _ = build(mesh)
        return model, torch.optim.SGD([next(model.parameters())], lr=0.01)

    def add(step: int) -> None:
        if step == 3:
            state.optimizer.add_param_group({"params": [state.model.bias]})

    state = elastipod.State(build_for_weights, mesh={"shard": -1}, checkpoints=tmp_path)
    with pytest.raises(
        UnknownSharding,
        match=r"^optimizer has parameter groups of 1 and 1 parameters, and build\(\) gives it groups of 1;",
    ):
        train(state, add)
    assert state.completed == 3
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_an_optimizer_may_keep_tensors_that_are_whole_on_the_mesh(tmp_path: Path) -> None:
    state = elastipod.State(partial(build_factored, [Replicate()]), mesh={"shard": -1}, checkpoints=tmp_path)
    assert len(train(state)) == 6


def test_members_are_asked_for_inside_of_the_loop_only() -> None:
    state = elastipod.State(build, mesh={"shard": -1})
    with pytest.raises(AttributeError, match=r"exist only inside the loop over state\.steps"):
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

    with pytest.raises(TypeError, match="make it after fully_shard, which replaces them"):
        train(elastipod.State(too_early, mesh={"shard": -1}))
