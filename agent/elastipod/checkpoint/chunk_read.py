"""Reading parts of chunks from images and from other ranks, verified block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from elastipod.checkpoint.image import CHECKSUM_BLOCK, checksum
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.save_plan import Chunk


@dataclass(slots=True)
class ChunkRead:
    """Whole checksum blocks of a chunk, from byte ``start`` to ``end``, and the target that they are for.

    is_direct: they go into the target's tensor unchanged; otherwise into a buffer, and from there once verified.
    """

    number: int
    start: int
    end: int
    chunk: Chunk
    target: LoadTarget
    is_direct: bool
    _buffer: torch.Tensor | None = None

    @property
    def num_checksum_blocks(self) -> int:
        return -(-(self.end - self.start) // CHECKSUM_BLOCK)

    def buffer(self) -> torch.Tensor:
        if self.is_direct:
            memory, (first, _) = self.target.direct_view(self.chunk), self.target.byte_range(self.chunk)
            assert memory is not None
            return memory[self.start - first : self.end - first]
        self._buffer = torch.empty(self.end - self.start, dtype=torch.uint8, device="cpu")
        return self._buffer

    def copy_from_buffer(self) -> None:
        """Copy the content of a separate buffer to the target."""
        if self._buffer is not None:
            copy_bytes(self._buffer, self.start, self.chunk, self.target)
            self._buffer = None


def chunk_reads(number: int, chunk: Chunk, target: LoadTarget) -> Iterator[ChunkRead]:
    """Divide what a target needs into what goes straight into its tensor and blocks at either end that it shares."""
    first, last = target.byte_range(chunk)
    start, end = (
        first // CHECKSUM_BLOCK * CHECKSUM_BLOCK,
        min(-(-last // CHECKSUM_BLOCK) * CHECKSUM_BLOCK, chunk.num_bytes),
    )
    cuts = [start, end]
    inner_start, inner_end = (
        -(-first // CHECKSUM_BLOCK) * CHECKSUM_BLOCK,
        end if end == last else last // CHECKSUM_BLOCK * CHECKSUM_BLOCK,
    )
    is_split = target.direct_view(chunk) is not None and inner_start < inner_end
    if is_split:
        cuts = [start, inner_start, inner_end, end]
    for left, right in pairwise(cuts):
        if left < right:
            yield ChunkRead(number, left, right, chunk, target, is_split and left == inner_start)


def copy_bytes(raw: torch.Tensor, start: int, chunk: Chunk, target: LoadTarget) -> None:
    """Copy to a target the part of it that lies in these bytes of the chunk, from byte ``start`` on.

    If the target needs a conversion, the bytes hold all of it.
    """
    first, last = target.byte_range(chunk)
    left, right = max(first, start), min(last, start + raw.numel())
    memory = target.direct_view(chunk)
    if memory is None:
        target.fill_from_bytes(raw[left - start : right - start], chunk)
    else:
        memory[left - first : right - first].copy_(raw[left - start : right - start])


def copy_and_verify(raw: torch.Tensor, chunk: Chunk, target: LoadTarget, sums: Sequence[int]) -> bool:
    """Copy a target out of a chunk; return whether the checksums of the blocks that it used are right."""
    is_right = True
    for read in chunk_reads(0, chunk, target):
        place = read.buffer() if read.is_direct else None
        for start in range(read.start, read.end, CHECKSUM_BLOCK):
            block = raw[start : min(start + CHECKSUM_BLOCK, read.end)]
            if place is not None:
                block = place[start - read.start :][: len(block)].copy_(block)
            is_right &= checksum(block) == sums[start // CHECKSUM_BLOCK]
        if place is None:
            copy_bytes(raw[read.start : read.end], read.start, chunk, target)
    return is_right


def verify_stream(
    size: int, wanted: Callable[[], list[int]], at_end: Callable[[bool], None]
) -> Callable[[torch.Tensor], None]:
    """Return a function that sums ``size`` bytes as they arrive, and calls ``at_end`` with whether the checksums are right.

    wanted: returns the expected checksums; called at the end.
    """
    arrived = 0
    sums = [0] * -(-size // CHECKSUM_BLOCK)

    def add(block: torch.Tensor) -> None:
        nonlocal arrived
        while count := min(block.numel(), CHECKSUM_BLOCK - arrived % CHECKSUM_BLOCK):
            sums[arrived // CHECKSUM_BLOCK] += checksum(block[:count])
            arrived += count
            block = block[count:]
        if arrived == size:
            at_end([each % (1 << 64) for each in sums] == wanted())

    return add
