"""Lets planned faults happen inside forward and backward passes. Registers nothing unless such a fault is planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastipod.chaos import Moment, is_planned, reached


class ChaosHooks:
    """The hooks on one model, which has no wrapper."""

    def __init__(self, model: nn.Module) -> None:
        self._rank = self._step = 0
        if is_planned(Moment.FORWARD):
            model.register_forward_pre_hook(self._forward)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if is_planned(Moment.BACKWARD):
            trained[0].register_hook(self._backward)  # type: ignore[no-untyped-call]
        if is_planned(Moment.COLLECTIVE):
            trained[-1].register_hook(self._collective)  # type: ignore[no-untyped-call]

    def begin(self, rank: int, step: int) -> None:
        """Begin a step."""
        self._rank, self._step = rank, step
        reached(Moment.STEP, rank=rank, step=step)

    def _forward(self, *_: Any) -> None:
        reached(Moment.FORWARD, rank=self._rank, step=self._step)

    def _backward(self, gradient: torch.Tensor) -> None:
        reached(Moment.BACKWARD, rank=self._rank, step=self._step)

    def _collective(self, gradient: torch.Tensor) -> None:
        reached(Moment.COLLECTIVE, rank=self._rank, step=self._step)
