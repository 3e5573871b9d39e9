"""Checkpoints that the version before wrote."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from tests.nonempty import every, some
from torch.optim.swa_utils import AveragedModel

from elastipod.checkpoint import CheckpointManager
from elastipod.in_memory.durable_tier import DurableTier
from elastipod.in_memory.members import Members

EARLIER = Path(__file__).parent / "earlier"  # written by the version before several optimizers


# -- checkpoints of earlier versions --------------------------------------------------------------------------------


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2, bias=False))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    for step in range(3):
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        schedule.step()


def plain_run() -> dict[str, Any]:
    model = net()
    first, _, last = model.children()
    groups = [
        {"params": [first.weight, last.weight], "weight_decay": 0.1},
        {"params": [first.bias], "lr": 0.02},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], gamma=0.5),
    }


def state_members() -> Members:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return Members(
        {
            "model": model,
            "average": AveragedModel(model),
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], gamma=0.5),
            "scaler": torch.amp.GradScaler("cpu"),
        }
    )


def keys_in(folder: Path) -> dict[str, Any]:
    """Give keys, paths and kinds of what the checkpoint in a folder holds, in their order."""
    (metadata,) = folder.rglob(".metadata")
    found = pickle.loads(metadata.read_bytes())
    return {
        key: (found.planner_data[key], type(entry).__name__, getattr(entry, "size", None))
        for key, entry in found.state_dict_metadata.items()
    }


def test_a_checkpoint_of_the_version_before_is_loaded_and_written_as_before(tmp_path: Path) -> None:
    loaded = plain_run()
    torch.manual_seed(7)
    original = plain_run()
    train(original["model"], original["optimizer"], original["scheduler"])
    shutil.copytree(EARLIER / "plain", tmp_path / "plain")
    with CheckpointManager(tmp_path / "plain", memory=False) as manager:
        resume = manager.load_latest(**loaded)
        assert resume is not None
        assert (resume.step, resume.extra) == (3, {"note": 3})
    for one, other in zip(some(original["model"].parameters()), loaded["model"].parameters(), strict=True):
        torch.testing.assert_close(one, other)
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(original["optimizer"].state[one][key], loaded["optimizer"].state[other][key])
    assert [group["lr"] for group in loaded["optimizer"].param_groups] == [0.025, 0.01]
    assert loaded["scheduler"].last_epoch == 3
    with CheckpointManager(tmp_path / "again", memory=False) as manager:
        manager.save(3, **original)
    assert list(keys_in(tmp_path / "again").items()) == list(keys_in(EARLIER / "plain").items())


def test_a_checkpoint_of_a_state_of_the_version_before_is_loaded_and_written_as_before(tmp_path: Path) -> None:
    torch.manual_seed(7)
    members = state_members()
    shutil.copytree(EARLIER / "state", tmp_path / "state")
    tier = DurableTier(tmp_path / "state", members, keep=1)
    resume = tier.load()
    assert resume is not None
    assert resume.step == 3
    assert members["schedule"].last_epoch == 3
    assert members["scaler"].get_scale() == 256.0
    assert int(members["average"].n_averaged) == 1
    assert every(
        torch.equal(one, other)
        for one, other in zip(members["average"].module.parameters(), members.model.parameters(), strict=True)
    )
    assert every(len(state) == 3 for state in members["optimizer"].state.values())
    tier.save(4, {}, None, waits=True)
    tier.close(None)
    assert keys_in(tmp_path / "state") == keys_in(EARLIER / "state")
