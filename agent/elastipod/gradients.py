"""Gradient accumulation that costs one reduction per step, the same way for DDP, FSDP2, HSDP and a plain module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from elastipod.data import Batch, MicroBatch
    from elastipod.torch_compat import FSDPModule


def accumulate(model: nn.Module, batch: Batch, size: int | None = None) -> Iterator[MicroBatch]:
    """Give the passes of one optimizer step; the gradients that they leave are those of the mean over the global batch.

    ``for part in accumulate(model, batch, size=8): (loss_of(part.indices) * part.weight).backward()``, with a loss that is
    the mean over the pass's samples. Forward and backward both belong into the loop's body. Every rank makes equally many
    passes, also where it has no sample, and only the last one reduces gradients over the ranks. size: samples of one pass at
    most; None makes one pass of all.
    """
    for part in batch.micro_batches(size):
        with gradient_sync(model, part.is_last):
            yield part


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Run forward and backward inside; gradients are reduced over the ranks only where ``enabled``.

    Pass `MicroBatch.is_last`. Every rank must call it equally often with the same values, since reducing is a collective.
    DDP needs the forward pass inside as well as the backward pass. FSDP2 keeps whole gradients in memory until the last pass.
    model: may be what torch.compile made of one, or a plain module with parts that FSDP2 shards.
    """
    from elastipod.torch_compat import DistributedDataParallel

    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        with nullcontext() if enabled else model.no_sync():
            yield
        return
    sharded = _sharded(model)
    for part in sharded:
        part.set_requires_gradient_sync(enabled)
    try:
        yield
    finally:
        for part in sharded:
            part.set_requires_gradient_sync(True)


def _sharded(model: nn.Module) -> list[FSDPModule]:
    """Give the outermost parts of a model that FSDP2 shards."""
    from elastipod.torch_compat import FSDPModule

    if isinstance(model, FSDPModule):
        return [model]
    return [part for child in model.children() for part in _sharded(child)]
