"""Managers that save to a directory and to memory, and the page of the agent that they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.unit.checkpoint.trainer import Trainer

from elastipod import local_worker
from elastipod.checkpoint import CheckpointManager
from elastipod.worker_file import WORKER_FILE_ENV, WorkerFile

ONE_PROCESS = pytest.mark.filterwarnings("ignore:torch.distributed is .*unavailable or uninitialized")


def save_async(trainer: Trainer, manager: CheckpointManager, step: int, *, durable: bool = True) -> None:
    manager.save_async(
        step, model=trainer.model, optimizer=trainer.optimizer, scheduler=trainer.scheduler, durable=durable
    )


@contextmanager
def agent_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerFile]:
    """Be the worker of an agent that has this page."""
    with WorkerFile.create(folder / "page", 1) as file:
        monkeypatch.setenv(WORKER_FILE_ENV, str(folder / "page"))
        local_worker._opened.cache_clear()
        yield file
    monkeypatch.delenv(WORKER_FILE_ENV, raising=False)
    local_worker._opened.cache_clear()


class Regression:
    """A badly scaled problem, on which Adam's moments matter: without them its first step is as large in each direction."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, betas=(0.9, 0.99))
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1000)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(64, 8, generator=generator)
        self.wanted = self.inputs @ torch.arange(8.0)[:, None]

    def train(self, steps: int) -> list[float]:
        losses: list[float] = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = (self.model(self.inputs) - self.wanted).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses
