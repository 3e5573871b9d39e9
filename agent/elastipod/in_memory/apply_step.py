"""Applies the gradients of a step to all members: the one part of a step that changes the state."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from elastipod.in_memory.members import Members
from elastipod.torch_compat import is_unscaled


def unscale_gradients(members: Members) -> bool:
    """Unscale the gradients of all optimizers if there is a GradScaler, unless the script has. Tell whether there were any.

    With sharded gradients it is a collective: the ranks agree whether any of them overflows. `GradScaler.step` would unscale them, too,
    but a rank must be able to apply its gradients alone. Raises RuntimeError when a peer is gone.
    """
    has_unscaled = False
    for scaler in members.of_type(torch.amp.GradScaler):
        for optimizer in members.of_type(torch.optim.Optimizer):
            if scaler.is_enabled() and _has_gradients(optimizer) and not is_unscaled(scaler, optimizer):
                scaler.unscale_(optimizer)
                has_unscaled = True
    return has_unscaled


def apply_gradients(members: Members) -> None:
    """Run all optimizers (through the GradScaler if there is one), then schedules, then averages of the weights."""
    (scaler, *more) = [*members.of_type(torch.amp.GradScaler), None]
    if scaler is not None and more != [None]:
        raise TypeError("there are several GradScalers; give State an apply function that runs them")
    if members.of_type(ReduceLROnPlateau):
        raise TypeError("ReduceLROnPlateau needs a loss at each step; give State an apply function that passes it one")
    is_scaled = False
    for optimizer in members.of_type(torch.optim.Optimizer):
        # A GradScaler refuses an optimizer without any gradient, such as that of a network which other steps train.
        if scaler is None or not _has_gradients(optimizer):
            optimizer.step()
        else:
            scaler.step(optimizer)
            is_scaled = True
    if scaler is not None and is_scaled:
        scaler.update()
    for schedule in members.of_type(LRScheduler):
        schedule.step()
    for average in members.of_type(AveragedModel):
        average.update_parameters(members.model)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(each.grad is not None for group in optimizer.param_groups for each in group["params"])
