"""What the sample log notes of a checkpoint, and the optimizer's moments in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.trainer import Trainer
from tests.unit.library.sample_logs import PLAN

from elastipod import SampleLog
from elastipod.audit.moments import optimizer_norm
from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.directory_store import DirectoryStore


def test_the_sample_log_notes_the_checkpoint_with_its_moments(tmp_path: Path) -> None:
    trainer, manager = Trainer(), CheckpointManager(tmp_path / "checkpoints")
    trainer.step(1)
    with SampleLog(tmp_path, PLAN, generation=manager.claim(), rank=0, world_size=1) as log:
        manager.save(1, model=trainer.model, optimizer=trainer.optimizer, sample_log=log)
    last = json.loads(log.path.read_text().splitlines()[-1])
    assert (last["kind"], last["step"], last["optimizer_norm"]) == ("saved", 1, optimizer_norm(trainer.optimizer))


def test_the_sample_log_is_durable_before_the_checkpoint_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in between would otherwise leave a checkpoint whose samples nobody knows."""
    order: list[str] = []

    def noted(place: type, name: str) -> None:
        whole = getattr(place, name)

        def call(*arguments: Any, **named: Any) -> Any:
            order.append(name)
            return whole(*arguments, **named)

        monkeypatch.setattr(place, name, call)

    noted(SampleLog, "sync")
    noted(DirectoryStore, "commit")
    noted(SampleLog, "saved")
    trainer, manager = Trainer(), CheckpointManager(tmp_path / "checkpoints")
    with SampleLog(tmp_path, PLAN, generation=manager.claim(), rank=0, world_size=1) as log:
        manager.save(1, model=trainer.model, optimizer=trainer.optimizer, sample_log=log)
    assert order[:3] == ["sync", "commit", "saved"]


def test_moments_of_all_parameter_groups_are_kept_and_counted(tmp_path: Path) -> None:
    def made() -> tuple[torch.nn.Linear, torch.optim.Adam]:
        model = torch.nn.Linear(3, 2)
        groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
        return model, torch.optim.Adam(groups)

    model, optimizer = made()
    model(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 4
    norm = torch.cat([each.flatten().double() for each in moments]).norm()
    assert optimizer_norm(optimizer) == pytest.approx(float(norm), rel=1e-12)
    CheckpointManager(tmp_path).save(1, model=model, optimizer=optimizer)
    other, resumed = made()
    assert CheckpointManager(tmp_path).load_latest(model=other, optimizer=resumed) is not None
    for mine, theirs in zip((model.weight, model.bias), (other.weight, other.bias), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[mine][name], resumed.state[theirs][name])
    assert optimizer_norm(resumed) == optimizer_norm(optimizer)


def test_the_norm_is_that_of_all_moments() -> None:
    trainer = Trainer()
    assert optimizer_norm(trainer.optimizer) == 0
    trainer.step(1)
    state = trainer.optimizer.state.values()
    moments = torch.cat([each[name].flatten().double() for each in state for name in ("exp_avg", "exp_avg_sq")])
    assert optimizer_norm(trainer.optimizer) == pytest.approx(float(moments.norm()), rel=1e-12)
