"""Applies the gradients of a step to all members: the one part of a step that changes the state."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from elastipod.chaos import Moment, reached
from elastipod.in_memory.members import Members
from elastipod.torch_compat import is_unscaled, scale_updates

log = logging.getLogger(__name__)


def unscale_gradients(members: Members) -> None:
    """Unscale the gradients of all optimizers if there is a GradScaler, unless the script has.

    With sharded gradients it is a collective: the ranks agree whether any of them overflows. `GradScaler.step` would unscale them, too,
    but a rank must be able to apply its gradients alone. Raises RuntimeError when a peer is gone.
    """
    for scaler in members.of_type(torch.amp.GradScaler):
        for optimizer in members.of_type(torch.optim.Optimizer):
            if not is_unscaled(scaler, optimizer):
                scaler.unscale_(optimizer)


def apply_gradients(members: Members) -> None:
    """Run all optimizers (through the GradScaler if there is one), then schedules, then averages of the weights."""
    (scaler, *more) = [*members.of_type(torch.amp.GradScaler), None]
    if scaler is not None and more != [None]:
        raise TypeError("there are several GradScalers; give State an apply function that runs them")
    if members.of_type(ReduceLROnPlateau):
        raise TypeError("ReduceLROnPlateau needs a loss at each step; give State an apply function that passes it one")
    for optimizer in members.of_type(torch.optim.Optimizer):
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    for schedule in members.of_type(LRScheduler):
        schedule.step()
    for average in members.of_type(AveragedModel):
        average.update_parameters(members.model)


class OptimizerWatch:
    """Knows whether an optimizer has run since the step began, so that one that the script runs itself is not run twice."""

    def __init__(self, members: Members) -> None:
        self.has_run = self._is_told = False
        self.rank = self.step = 0
        self._members = members
        self._updates: list[int] = []
        members.when_built(self._attach)

    def _attach(self) -> None:
        for optimizer in self._members.of_type(torch.optim.Optimizer):
            optimizer.register_step_pre_hook(self._note)
            optimizer.register_step_post_hook(self._after)

    def begin(self, rank: int, step: int) -> None:
        """Begin a step."""
        self.has_run, self.rank, self.step = False, rank, step
        self._updates = self._scale_updates()

    def note_left_out(self) -> None:
        """Take it for a run as well when the script's GradScaler has left the optimizers out: it has been updated then."""
        if not self.has_run:
            self.has_run = self._scale_updates() != self._updates

    def committed(self, *, is_kept: bool) -> None:
        """The step counts. is_kept: this process is to recover in memory, so rank 0 says once what the script's own run may cost."""
        if self.has_run and is_kept and self.rank == 0 and not self._is_told:
            self._is_told = True
            log.warning(
                "the script runs its optimizer inside the step's block: if a peer is lost in a collective that follows in the block, no "
                "rank holds a whole step any more, and the job goes back to a checkpoint or to its beginning; leave the optimizer to State "
                "or to its apply=, or let it be the last thing in the block"
            )
        self.has_run = False

    def _scale_updates(self) -> list[int]:
        return [scale_updates(each) for each in self._members.of_type(torch.amp.GradScaler)]

    def _note(self, *_: Any) -> None:
        self.has_run = self.step > 0  # before the first step of its own, a newcomer repeats those of others

    def _after(self, *_: Any) -> None:
        if self.step:
            reached(Moment.APPLY, rank=self.rank, step=self.step)
