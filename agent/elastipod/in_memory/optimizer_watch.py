"""Knows what of a step the script runs itself.

Optimizers that run in the block do not run again at its end. What would run twice, or change the state between two steps, is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from elastipod.chaos import Moment, reached
from elastipod.in_memory.members import Members
from elastipod.torch_compat import epochs_of, scale_updates

log = logging.getLogger(__name__)

OUTSIDE = "optimizer.step() was called after the block; State has already applied the gradients. Remove the call"
TWICE = (
    "scheduler.step() was called, and State steps the schedule in each step; remove scheduler.step(), or pass apply= to step it "
    "yourself"
)


class OptimizerWatch:
    """Watches the members over the steps of one rank. has_run: whether an optimizer has run since the step began."""

    def __init__(self, members: Members, is_in_block: Callable[[], bool], *, steps_schedules: bool) -> None:
        """is_in_block: whether the block of a step is being run. steps_schedules: whether State does, in a step that it applies.

        Where State does not, the script's own `apply` does.
        """
        self.has_run = self._is_told = self._applies = False
        self.rank = self.step = 0
        self._members = members
        self._is_in_block = is_in_block
        self._updates: Sequence[int] | None = None  # of GradScalers, at the beginning of the step that is under way
        self._steps_schedules = steps_schedules
        self._schedules_at: Sequence[int] | None = None  # None where the script may step them
        self._before_apply: object = None  # what the script's own `apply` has found
        members.when_built(self._attach)

    def _attach(self) -> None:
        for optimizer in self._members.of_type(torch.optim.Optimizer):
            optimizer.register_step_pre_hook(self._note)
            optimizer.register_step_post_hook(self._after)

    def begin(self, rank: int, step: int) -> None:
        """Begin a step. Raises TypeError when the script has stepped a schedule since State did."""
        self.check_schedules()
        self.has_run, self.rank, self.step = False, rank, step
        self._before_apply = None
        self._updates = self._scale_updates()
        self._schedules_at = self._epochs() if self._steps_schedules else None

    def note_left_out(self) -> None:
        """Take it for a run as well when the script's GradScaler has left the optimizers out: it has been updated then."""
        self.has_run = self.has_run or self._has_updated_scale()

    def check_schedules(self) -> None:
        """Raise TypeError when the script has stepped a schedule that State steps."""
        if self._schedules_at is not None and self._schedules_at != self._epochs():
            raise TypeError(TWICE)

    @property
    def is_torn(self) -> bool:
        """Whether the step that is under way has changed the members, so that they are no step's if it does not count.

        An `apply` of the script may use collectives, which fail, and change more than optimizers do. Not seen are changes of a
        parameter through its ``data``, of what an entry does not tell in its state_dict, and of a tensor that an entry replaces.
        """
        has_changed = self._before_apply is not None and self._before_apply != self._changeable()
        return self.has_run or has_changed or self._has_updated_scale()

    @contextmanager
    def applying(self) -> Iterator[None]:
        """Let optimizers run, though the block has ended: State applies the step."""
        self._applies = True
        if not self._steps_schedules:
            self._before_apply = self._changeable()
        try:
            yield
        finally:
            self._applies = False

    def committed(self, *, by_script: bool, is_kept: bool) -> None:
        """The step counts. by_script: its optimizer ran in the block.

        is_kept: this process is to recover in memory, so rank 0 says once what that may cost.
        """
        self._schedules_at = self._epochs() if self._steps_schedules and not by_script else None
        if by_script and is_kept and self.rank == 0 and not self._is_told:
            self._is_told = True
            log.warning(
                "the script runs its optimizer inside the step's block: if a peer is lost in a collective that follows in the block, no "
                "rank holds a whole step any more, and the job goes back to a checkpoint or to its beginning; leave the optimizer to State "
                "or to its apply=, or let it be the last thing in the block"
            )
        self.has_run, self._before_apply, self._updates = False, None, None

    def left(self) -> None:
        """The world is over, and the members may be given another step's state."""
        self.has_run, self._schedules_at, self._before_apply, self._updates = False, None, None, None

    def close(self) -> None:
        """The loop is over: the script may use its optimizers as it likes."""
        self.step = 0

    def _has_updated_scale(self) -> bool:
        """Whether a GradScaler has been updated in the step that is under way; it may have left the optimizers out."""
        return self._updates is not None and self._updates != self._scale_updates()

    def _scale_updates(self) -> list[int]:
        return [scale_updates(each) for each in self._members.of_type(torch.amp.GradScaler)]

    def _epochs(self) -> list[int]:
        return [epoch for each in self._members.of_type(LRScheduler) for epoch in epochs_of(each)]

    def _changeable(self) -> object:
        """Give what differs once a script has changed something that optimizers do not: cheap, as it is asked for in each step."""
        versions = [each._version for module in self._members.of_type(nn.Module) for each in module.parameters()]
        return versions, self._epochs(), self._members.own_versions()

    def _note(self, *_: Any) -> None:
        if not self.step:  # before the first step of its own, a newcomer repeats those of others
            return
        if not self._applies and not self._is_in_block():
            raise TypeError(OUTSIDE)
        self.has_run = True

    def _after(self, *_: Any) -> None:
        if self.step:
            reached(Moment.APPLY, rank=self.rank, step=self.step)
