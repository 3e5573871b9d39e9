"""Lets planned faults happen inside forward and backward passes. Registers nothing unless such a fault is planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elastipod.chaos import Moment, is_planned, reached
from elastipod.in_memory.members import Members
from elastipod.in_memory.sharded_gradients import is_sharded
from elastipod.torch_compat import TorchDispatchMode

BEGINS_S = 0.002  # from the call of a collective to the fault in it; the backend's threads have begun with it by then


class ChaosHooks:
    """The hooks on a model, which has no wrapper, and on those that are built in its place."""

    def __init__(self, members: Members) -> None:
        self._rank = self._step = 0
        self._has_gradient = False
        self._collectives: _Collectives | None = None
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
            trained[-1].register_hook(self._first_gradient)  # type: ignore[no-untyped-call]

    def begin(self, rank: int, step: int) -> None:
        """Begin a step. What it computes until `end` is looked through for its collectives, if a fault in one is planned."""
        self.end()
        self._rank, self._step = rank, step
        reached(Moment.STEP, rank=rank, step=step)
        if is_planned(Moment.COLLECTIVE, rank=rank, step=step):
            self._has_gradient = False
            self._collectives = _Collectives(self._collective)
            self._collectives.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """The passes of the step have ended, or no step has begun."""
        collectives, self._collectives = self._collectives, None
        if collectives is not None:
            collectives.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _forward(self, *_: Any) -> None:
        reached(Moment.FORWARD, rank=self._rank, step=self._step)

    def _sharded(self, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            for hook in (self._backward, self._first_gradient):
                output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _backward(self, gradient: torch.Tensor) -> None:
        reached(Moment.BACKWARD, rank=self._rank, step=self._step)

    def _first_gradient(self, gradient: torch.Tensor) -> None:
        self._has_gradient = True

    def _collective(self) -> None:
        if self._has_gradient:
            self._has_gradient = False  # the first collective is enough
            time.sleep(BEGINS_S)
            reached(Moment.COLLECTIVE, rank=self._rank, step=self._step)


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``under_way`` when this thread has begun a collective that can be one of gradients, before it waits for it.

    DDP and FSDP2 call collectives in the thread of the backward pass, through torch's dispatcher as the functions of torch.distributed
    do, so one place sees all of them.
    """

    def __init__(self, under_way: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._under_way = under_way

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and _is_of_gradients(func.__name__, args):
            self._under_way()
        return found


def _is_of_gradients(name: str, args: Sequence[Any]) -> bool:
    """Tell whether a collective adds numbers up, or gathers them for a sum of the script's own, as `fixed_order_passes` does.

    FSDP2 gathers weights, in the backward pass too, through another one.
    """
    if "reduce" in name:
        return True
    return name.startswith("allgather_.") and bool(args[1][0].is_floating_point())
