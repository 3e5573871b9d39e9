"""The blocks in which raw bytes travel between two ranks: parts of large buffers, and small buffers together.

Sender and receiver derive the same blocks from the same sizes. A block of its own for each bias and each scalar would cost both of them
more than its bytes do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

BLOCK_BYTES = 4 << 20  # sent at once; still in the processor's cache when the checksum is computed
SMALL_BYTES = 1 << 18  # a buffer of at most this many travels with its neighbours
TOGETHER_BYTES = 1 << 20  # of small buffers

OnBlock = Callable[[torch.Tensor], None]
Buffer = tuple[torch.Tensor, OnBlock | None]


def blocks_to_send(buffers: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the blocks of contiguous uint8 tensors."""
    for group in _groups((data, None) for data in buffers):
        parts = [data for data, _ in group]
        yield parts[0] if len(parts) == 1 else torch.cat(parts)


def blocks_to_receive(buffers: Iterable[Buffer]) -> Iterator[Buffer]:
    """Yield the blocks of buffers, each with what is to be called once it has arrived: it fills the buffers of a block in order."""
    for group in _groups(buffers):
        if len(group) == 1:
            yield group[0]
        else:
            yield torch.empty(sum(data.numel() for data, _ in group), dtype=torch.uint8, device="cpu"), _filling(group)


def _groups(buffers: Iterable[Buffer]) -> Iterator[list[Buffer]]:
    """Yield the buffers of each block: one part of a large buffer, or small ones that follow one another."""
    small: list[Buffer] = []
    size = 0
    for data, on_block in buffers:
        is_small = data.numel() <= SMALL_BYTES
        if small and (not is_small or size + data.numel() > TOGETHER_BYTES):
            yield small
            small, size = [], 0
        if is_small:
            if data.numel():
                small.append((data, on_block))
            size += data.numel()
            continue
        for start in range(0, data.numel(), BLOCK_BYTES):
            yield [(data[start : start + BLOCK_BYTES], on_block)]
    if small:
        yield small


def _filling(group: list[Buffer]) -> OnBlock:
    def fill(block: torch.Tensor) -> None:
        start = 0
        for data, on_block in group:
            data.copy_(block[start : start + data.numel()])
            start += data.numel()
            if on_block is not None:
                on_block(data)

    return fill
