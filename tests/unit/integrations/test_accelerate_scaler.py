"""The scale of 16-bit losses goes on after a resize, in a loop of Accelerate's, whose package is not installed here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elastipod.checkpoint import CheckpointManager
from elastipod.errors import DataError


def train(
    integration: Any,
    folder: Path,
    scaler: torch.amp.GradScaler | None,
    *,
    epochs: int = 1,
    sample_log: Path | None = None,
) -> int:
    """Train to the end of the epochs, as a script does: two steps in each. Gives the steps that were made."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accelerator = SimpleNamespace(
        distributed_type=None,
        gradient_accumulation_steps=1,
        device="cpu",
        scaler=scaler,
        backward=lambda loss: (loss if scaler is None else scaler.scale(loss)).backward(),
    )
    loader = DataLoader(TensorDataset(torch.ones(4, 1)), batch_size=2)
    steps = integration.elastic_steps(
        accelerator, loader, model, optimizer, global_batch=2, checkpoints=folder, epochs=epochs, sample_log=sample_log
    )
    made = 0
    for step in steps:
        for (inputs,) in step:
            step.backward(model(inputs).mean())
        made += 1
        optimizer.step()
        if scaler is not None:
            scaler.update(scaler.get_scale() / 2)
    return made


def test_the_scale_of_the_losses_is_that_of_the_last_step(integration: Any, tmp_path: Path) -> None:
    train(integration, tmp_path, torch.amp.GradScaler("cpu", init_scale=2.0**16))
    resumed = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    train(integration, tmp_path, resumed, epochs=2)
    assert resumed.get_scale() == 2.0**12


def test_a_checkpoint_without_a_scale_begins_with_that_of_the_script(integration: Any, tmp_path: Path) -> None:
    train(integration, tmp_path, None)
    resumed = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    train(integration, tmp_path, resumed, epochs=2)
    assert resumed.get_scale() == 2.0**14


def test_a_script_without_a_scale_resumes_from_a_checkpoint_with_one(integration: Any, tmp_path: Path) -> None:
    train(integration, tmp_path, torch.amp.GradScaler("cpu"))
    train(integration, tmp_path, None, epochs=2)


def test_a_directory_of_another_script_is_refused_by_name(integration: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with CheckpointManager(tmp_path, memory=False) as manager:
        path = manager.save(1, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    with pytest.raises(DataError) as refused:
        train(integration, tmp_path, None)
    assert str(refused.value) == (
        f"{path} holds no position in the data, because another script has saved it; name another directory"
    )
