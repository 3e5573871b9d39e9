"""Gradient accumulation with one reduction per step, for DDP, FSDP2, HSDP and plain modules alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from elastipod.data import Batch, MicroBatch
    from elastipod.torch_compat import FSDPModule


_observers: list[Callable[[float], None]] = []


def observe_reduced_gradients(observer: Callable[[float], None]) -> Callable[[], None]:
    """Call ``observer`` whenever a script's own reduction announces its gradients; give a function that ends it."""
    _observers.append(observer)
    return lambda: _observers.remove(observer)


def announce_reduced_gradients(divisor: float) -> None:
    """Say that the parameters' gradients are now the sum over all ranks' own ones, divided by ``divisor``.

    For scripts that reduce gradients themselves, so that they are checked in the first step after a change of the world as those
    of DDP are. Call it before anything else is done to the gradients, such as clipping.
    """
    for observer in tuple(_observers):
        observer(divisor)


def accumulate(model: nn.Module, batch: Batch, size: int | None = None) -> Iterator[MicroBatch]:
    """Give the micro-batches of one optimizer step. After the loop the gradients are those of the mean over the global batch.

    ``for micro in accumulate(model, batch, size=8): (loss_of(micro.indices) * micro.weight).backward()``, with a loss that is
    the mean over the samples of the micro-batch. Run both the forward and the backward pass in the body of the loop. Every rank
    makes the same number of passes, even one without samples, and only the last pass reduces gradients over the ranks.

    size: maximum number of samples per pass; None: one pass for all. Call it on every rank with the same size. Raises
    ValueError for a size below 1.
    """
    for micro_batch in batch.micro_batches(size):
        with gradient_sync(model, micro_batch.is_last):
            yield micro_batch


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Run a forward and backward pass that reduces gradients over the ranks only if ``enabled``.

    enabled: usually `MicroBatch.is_last`. Reducing is a collective, so every rank must call this equally often with the same
    values. DDP needs both the forward and the backward pass inside the block. FSDP2 keeps unsharded gradients in memory until
    the last pass. model: may be compiled with torch.compile, or a plain module with submodules that FSDP2 shards.
    """
    from elastipod.torch_compat import DistributedDataParallel, without_compile_wrapper

    model = without_compile_wrapper(model)
    if isinstance(model, DistributedDataParallel):
        with nullcontext() if enabled else model.no_sync():
            yield
        return
    sharded = _sharded(model)
    for module in sharded:
        module.set_requires_gradient_sync(enabled)
    try:
        yield
    finally:
        for module in sharded:
            module.set_requires_gradient_sync(True)


def _sharded(model: nn.Module) -> list[FSDPModule]:
    """Give the outermost submodules that FSDP2 shards."""
    from elastipod.torch_compat import FSDPModule

    if isinstance(model, FSDPModule):
        return [model]
    return [module for child in model.children() for module in _sharded(child)]
