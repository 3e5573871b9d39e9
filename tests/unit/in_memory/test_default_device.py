"""`State` in a script that has set a default device: what the library keeps in host memory must not follow it.

The device is "meta", where tensors have no content; a script on an accelerator sets "cuda".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
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

from elastipod import Copies, State
from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import audit
from elastipod.checkpoint.collective_planning import DOMAIN_ENV


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def _build(mesh: Any = None) -> dict[str, Any]:
    with torch.device("cpu"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        if mesh is not None:
            fully_shard(model, mesh=mesh)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}


def _train(state: State, reduced: Callable[[State, int], None]) -> list[Any]:
    worlds: list[list[int]] = []
    for step in state.steps(PLAN):
        with step as batch:
            if not worlds or worlds[-1][0] != state.generation:
                worlds.append([state.generation, batch.step])
            loss = state.model(DATA[list(batch.indices)]).square().mean() * batch.weight
            loss.backward()
            reduced(state, batch.step)
    return [worlds, state.completed]


def test_replicated_ranks_go_on_with_a_newcomer(tmp_path: Path) -> None:
    def train(process: int) -> list[Any]:
        state = State(
            _build,
            wrap=DistributedDataParallel,
            sample_log=tmp_path / "samples",
            checkpoints=tmp_path / "checkpoints",
            checkpoint_every=2,
        )
        return _train(state, partial(end_when_reduced, tmp_path))

    found = Job(tmp_path, Agents([[0, 1], [1, 0, 2]])).run(train, 3)
    assert found[2] == [[[2, OVER_AT + 1]], PLAN.total_steps]
    assert found[0] == found[1] == [[[1, 1], [2, OVER_AT + 1]], PLAN.total_steps]
    assert audit(read_logs(tmp_path / "samples")).exact


def test_sharded_ranks_with_copies_go_on_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(state: State, step: int) -> None:
        if state.generation == 1 and state.rank == 2 and step == OVER_AT:
            link = state._world.link
            assert link is not None
            link.report_fault(2, "broke")
            raise ZeroDivisionError

    def train(process: int) -> list[Any]:
        monkeypatch.setenv(DOMAIN_ENV, f"zone {process}")
        state = State(_build, mesh={"shard": -1}, sample_log=tmp_path / "samples", copies=Copies(1 << 20))
        if process < 2:
            return _train(state, leave)
        with pytest.raises(ZeroDivisionError):
            _train(state, leave)
        return []

    found = Job(tmp_path, Agents([[0, 1, 2], [0, 1]])).run(train, 3)
    assert found[0] == found[1] == [[[1, 1], [2, OVER_AT]], PLAN.total_steps]
    assert audit(read_logs(tmp_path / "samples")).exact
