"""Gradient accumulation that costs one reduction per step, the same way for DDP, FSDP2 and a plain module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Run forward and backward inside; gradients are reduced over the ranks only where ``enabled``.

    Pass `MicroBatch.is_last`. Every rank must call it equally often with the same values, since reducing is a collective.
    DDP needs the forward pass inside as well as the backward pass.
    """
    from elastipod.torch_names import DistributedDataParallel, FSDPModule

    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(enabled)
        yield
    elif isinstance(model, DistributedDataParallel) and not enabled:
        with model.no_sync():
            yield
    else:
        yield
