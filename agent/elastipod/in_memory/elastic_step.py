"""One step of the loop: a block that computes gradients, and whose end applies them, or not at all."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

import torch

from elastipod.data import Batch
from elastipod.errors import ElastipodError
from elastipod.value_words import value_or_kind


class StepOwner(Protocol):
    """What a step needs of the state that it belongs to."""

    def begin_step(self, batch: Batch) -> None: ...

    def commit_step(self, step: ElasticStep) -> None:
        """Sets ``is_done`` once the step is committed on this rank; what follows may fail all the same."""

    def is_world_lost(self, error: BaseException) -> bool: ...


class ElasticStep:
    """``with step as batch:`` computes the gradients of a batch; leaving the block applies them and commits the step.

    A collective that fails because a peer is gone ends the block without an error, and nothing of the step is left; the loop
    goes on with what comes next. loss: set it, to a number or a tensor with one element, to have it reported. A tensor on an accelerator
    is read when the step has ended, and not before. is_done: whether the step is committed on this rank, even if a
    peer is lost right after that. is_open: whether the block is being run. lost_to: the error by which the world was lost.
    """

    def __init__(self, state: StepOwner, batch: Batch) -> None:
        self.batch = batch
        self._loss: float | torch.Tensor | None = None
        self.is_done = self.is_open = False
        self.lost_to: BaseException | None = None
        self._state = state

    @property
    def loss(self) -> float | None:
        """What the script has set. Waits for an accelerator that still computes it."""
        if isinstance(self._loss, torch.Tensor):
            self._loss = float(self._loss.item())
        return self._loss

    @loss.setter
    def loss(self, value: object) -> None:
        """Raises TypeError for what is no number."""
        self._loss = _number(value)

    def __enter__(self) -> Batch:
        if self.is_open or self.is_done:
            raise TypeError(
                "a second block of the same step: the first one has applied its gradients and counted it; compute all gradients of "
                "a step in one block"
            )
        self.is_open = True
        if self.lost_to is None:  # else a block before it was interrupted, whose world this step cannot be trained in
            self._state.begin_step(self.batch)
        return self.batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.is_open = False
        if error is None:
            if self.lost_to is None:
                self._commit()
            return True
        if not self._state.is_world_lost(error):
            return False
        self.lost_to = self.lost_to or error
        return True

    def _commit(self) -> None:
        try:
            self._state.commit_step(self)
        except (RuntimeError, ElastipodError) as raised:
            if not self._state.is_world_lost(raised):
                raise
            self.lost_to = raised


def _number(value: Any) -> float | torch.Tensor | None:
    """Give a loss as a number; a tensor on an accelerator stays there, without its graph. Raises TypeError."""
    if value is None:
        return None
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise TypeError(
                f"step.loss is a Tensor of {value.numel()} elements; set a number, such as loss.mean().item()"
            )
        return float(value.item()) if value.device.type == "cpu" else value.detach()
    try:
        if hasattr(value, "__float__"):  # a text has none
            return float(value)
    except (TypeError, ValueError):
        pass  # such as an array of several numbers
    raise TypeError(f"step.loss is {value_or_kind(value)}; set a number, such as loss.item()")
