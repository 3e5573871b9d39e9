"""Gradient accumulation with one reduction per step, for DDP, FSDP2, HSDP and plain modules alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, SupportsInt

from elastipod.rank_in_world import RankInWorld
from elastipod.value_words import kind_of

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


@dataclass(frozen=True, slots=True)
class PaddedMicroBatch:
    """One forward and backward pass that has the same number of rows in every step.

    indices: dataset indices of the rows; the last ones may repeat a sample of the batch. row_weights: multiply the loss of each row
    by its own before they are summed and backward() is called; 0 for rows that only fill up. rows: where the indices are in the
    batch's `indices_or_spare`, for choosing from tensors that were loaded for the whole batch. is_last: gradients are reduced over
    the ranks in this pass.
    """

    indices: tuple[int, ...]
    row_weights: tuple[float, ...]
    rows: tuple[int, ...]
    is_last: bool


def accumulate(
    model: nn.Module, batch: Batch, size: int | None = None, *, tokens: SupportsInt | None = None
) -> Iterator[MicroBatch]:
    """Give the micro-batches of one optimizer step. After the loop the gradients are those of the mean over the global batch.

    ``for micro in accumulate(model, batch, size=8): (loss_of(micro.indices) * micro.weight).backward()``, with a loss that is
    the mean over the samples of the micro-batch. Run both the forward and the backward pass in the body of the loop. Every rank
    makes the same number of passes, even one without samples, and only the last pass reduces gradients over the ranks.

    size: maximum number of samples per pass; None: one pass for all. Call it on every rank with the same size.
    tokens: for a loss that is *summed* over the tokens (or whatever else is counted) of the micro-batch: their number in all of this
    rank's ``batch.indices``. The gradients are then those of the mean over the tokens of the global batch. The first pass waits for
    one sum over all ranks; every rank passes a number then.
    Raises ValueError for a size below 1, a negative number of tokens, and a batch that is divided over other ranks than there are.
    """
    _check(model, batch)
    share = None if tokens is None else _token_share(batch, tokens)
    for micro_batch in batch.micro_batches(size):
        if share is not None:
            micro_batch = replace(micro_batch, weight=share if micro_batch.weight else 0.0)
        with gradient_sync(model, micro_batch.is_last):
            yield micro_batch


def accumulate_padded(
    model: nn.Module, batch: Batch, size: int, *, tokens: SupportsInt | None = None
) -> Iterator[PaddedMicroBatch]:
    """Give the passes of one optimizer step, each of exactly ``size`` rows, so that a compiled model is compiled once.

    ``for part in accumulate_padded(model, batch, size=8): (losses_of(part.indices) @ torch.tensor(part.row_weights)).backward()``,
    with the loss of each row, or with ``tokens`` the sum over each row's tokens. What a short pass lacks is filled up with samples
    that weigh nothing; they cost time, and a BatchNorm counts them. Otherwise as `accumulate`, and the gradients are the same.
    """
    _check(model, batch)
    share = batch.world_size / batch.global_size if tokens is None else _token_share(batch, tokens)
    available = len(batch.indices_or_spare)
    for number in range(batch.num_passes(size)):
        own = range(number * size, min((number + 1) * size, len(batch.indices)))
        rows = tuple(own) + tuple(row % available for row in range(size - len(own)))
        weights = (share,) * len(own) + (0.0,) * (size - len(own))
        is_last = number == batch.num_passes(size) - 1
        with gradient_sync(model, is_last):
            yield PaddedMicroBatch(tuple(batch.indices_or_spare[row] for row in rows), weights, rows, is_last)


def _check(model: object, batch: object) -> None:
    """Raise TypeError where a script passes what holds its model or its batch."""
    from torch import nn

    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {kind_of(model)}; pass an nn.Module, such as state.model")
    if not hasattr(batch, "micro_batches"):
        raise TypeError(f"batch is {kind_of(batch)}; pass a Batch, such as that of `with step as batch:`")


def _token_share(batch: Batch, tokens: SupportsInt) -> float:
    """Give the factor on a sum over tokens, with which the mean over the ranks is the mean over all tokens. Collective.

    0 for a batch in which nothing counts. Ranks that train on the same samples count them alike, so it is right for them too.
    """
    from elastipod.collectives import sum_over_ranks

    count, ranks = int(tokens), RankInWorld.current().world_size
    if count < 0:
        raise ValueError(f"tokens is {count}; it is the number of tokens in this rank's samples, at least 0")
    if ranks % batch.world_size:
        raise ValueError(
            f"the batch is divided over {batch.world_size} ranks, but torch.distributed has {ranks}; tokens can only be counted "
            "over all of them"
        )
    total = sum_over_ranks(count if batch.indices else 0)
    return ranks / total if total else 0.0


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
