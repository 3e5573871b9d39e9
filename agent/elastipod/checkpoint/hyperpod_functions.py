"""`save_checkpoint` and `load_checkpoint` with the signatures of the samples in the HyperPod documentation.

The samples pass model and optimizer directly to torch.distributed.checkpoint. A new optimizer has no moments yet, so a load
asks for none and Adam silently starts over. These functions load the full optimizer state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from elastipod.checkpoint import CheckpointManager, Resume
from elastipod.checkpoint.training_state import Scheduler
from elastipod.errors import CheckpointError
from elastipod.process_restarts import need_not_tell

_managers: dict[tuple[str, str], CheckpointManager] = {}


class _LoadedTuple(NamedTuple):
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    lr_scheduler: Scheduler | None


class LoadedCheckpoint(_LoadedTuple):
    """The result of `load_checkpoint`: the three objects, which the samples unpack.

    resume: where training continues, None at the start; step: completed steps, 0 at the start; user_content: as saved.
    """

    resume: Resume | None = None

    @property
    def step(self) -> int:
        return self.resume.step if self.resume else 0

    @property
    def user_content(self) -> Mapping[str, Any]:
        return self.resume.extra if self.resume else {}


def save_checkpoint(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: Scheduler | None = None,
    user_content: Mapping[str, Any] | None = None,
    checkpoint_path: str | os.PathLike[str] | None = None,
    *,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    step: int | None = None,
) -> Path | str:
    """Save a checkpoint of ``step`` completed optimizer steps, as `CheckpointManager.save` does.

    checkpoint_path or checkpoint_dir: the directory of checkpoints, the same for every step. step: defaults to ``step`` or
    ``global_step`` of user_content, which holds JSON values. Collective. Raises TypeError when directory or step is missing,
    and CheckpointError.
    """
    content = dict(user_content or {})
    known = next((content[name] for name in ("step", "global_step") if name in content), None)
    number = known if step is None else step
    if not isinstance(number, int):
        raise TypeError("save_checkpoint needs the number of completed steps: pass step=, or user_content with 'step'")
    manager = _manager(checkpoint_path, checkpoint_dir)
    return manager.save(number, model=model, optimizer=optimizer, scheduler=lr_scheduler, extra=content)


def load_checkpoint(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    lr_scheduler: Scheduler | None = None,
    checkpoint_path: str | os.PathLike[str] | None = None,
    *,
    checkpoint_dir: str | os.PathLike[str] | None = None,
) -> LoadedCheckpoint:
    """Load the newest complete checkpoint of a directory into the given objects; without one they stay as they are.

    Unpacks as ``model, optimizer, lr_scheduler = load_checkpoint(...)``; its ``step`` says where to continue. Collective.
    Raises TypeError when the directory is missing, and CheckpointError as `CheckpointManager.load_latest` does.
    """
    manager = _manager(checkpoint_path, checkpoint_dir)
    loaded = LoadedCheckpoint(model, optimizer, lr_scheduler)
    loaded.resume = manager.load_latest(model=model, optimizer=optimizer, scheduler=lr_scheduler)
    return loaded


def _manager(path: str | os.PathLike[str] | None, directory: str | os.PathLike[str] | None) -> CheckpointManager:
    """Return the manager of a directory; one per generation, because in-process restarts span several."""
    need_not_tell()
    named = path if path is not None else directory
    if named is None:
        raise TypeError("name the directory of checkpoints: checkpoint_path or checkpoint_dir")
    if path is not None and directory is not None and os.fspath(path) != os.fspath(directory):
        raise CheckpointError(f"checkpoint_path is {path} and checkpoint_dir is {directory}; name one directory")
    key = os.fspath(named), os.environ.get("ELASTIPOD_GENERATION", "")
    if key not in _managers:
        for older in [each for each in _managers if each[0] == key[0]]:
            del _managers[older]  # its memory is freed with it, after a save in progress
        _managers[key] = CheckpointManager(named)
    return _managers[key]
