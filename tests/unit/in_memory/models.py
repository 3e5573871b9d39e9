"""A small training state for tests: a model, its optimizer, a schedule and averaged weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elastipod.in_memory.apply_step import apply_gradients
from elastipod.in_memory.members import Members


def build(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=1000)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "ema": AveragedModel(model)}


def trained(steps: int, seed: int = 0) -> Members:
    members = Members(build(seed))
    train(members, steps)
    return members


def train(members: Members, steps: int) -> None:
    for step in range(steps):
        members.zero_grad()
        members.model(torch.full((4, 3), float(step)) + torch.eye(4, 3)).square().sum().backward()
        apply_gradients(members)


class Compiled(nn.Module):
    """Wraps a module as torch.compile does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._orig_mod(inputs)
        return found
