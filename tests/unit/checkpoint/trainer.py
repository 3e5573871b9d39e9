"""A little training, and what its checkpoints consist of."""

from __future__ import annotations

from pathlib import Path

import torch

from elastipod.checkpoint import CheckpointManager
from elastipod.checkpoint.manifest import FileRecord, measure_stream


class Trainer:
    """A little model that can make steps."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4], gamma=0.5)

    def step(self, number: int) -> None:
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(number))
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()

    def save(self, manager: CheckpointManager, step: int, **extra: object) -> Path:
        path = manager.save(
            step, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, extra={"note": step, **extra}
        )
        assert isinstance(path, Path)
        return path

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def load(self, manager: CheckpointManager) -> int | None:
        resume = manager.load_latest(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        return resume.step if resume else None


def entries(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shard(checkpoint: Path) -> Path:
    return next(checkpoint.glob("__0_*"))


def measure_file(path: Path) -> FileRecord:
    """Give the length and CRC-32 of a file."""
    with path.open("rb") as file:
        return measure_stream(file)
