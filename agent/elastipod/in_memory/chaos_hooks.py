"""Lets planned faults happen inside forward and backward passes. Registers nothing unless such a fault is planned."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from elastipod.chaos import Moment, is_planned, reached
from elastipod.in_memory.members import Members
from elastipod.in_memory.sharded_gradients import is_sharded


class ChaosHooks:
    """The hooks on a model, which has no wrapper, and on those that are built in its place."""

    def __init__(self, members: Members) -> None:
        self._rank = self._step = 0
        members.when_built(lambda: self._attach(members.model))

    def _attach(self, model: nn.Module) -> None:
        if is_planned(Moment.FORWARD):
            model.register_forward_pre_hook(self._forward)
        if is_sharded(model):
            # Its own parameters get no gradients from autograd, so what follows the end of the forward pass is used.
            if is_planned(Moment.BACKWARD) or is_planned(Moment.COLLECTIVE):
                model.register_forward_hook(self._sharded)
            return
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

    def _sharded(self, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            for hook in (self._backward, self._collective):
                output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _backward(self, gradient: torch.Tensor) -> None:
        reached(Moment.BACKWARD, rank=self._rank, step=self._step)

    def _collective(self, gradient: torch.Tensor) -> None:
        reached(Moment.COLLECTIVE, rank=self._rank, step=self._step)
