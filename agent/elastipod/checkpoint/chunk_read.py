"""Reading parts of chunks from memory images and from other ranks, with verification of each checksum block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from elastipod.checkpoint.image import CHECKSUM_BLOCK, checksum
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.save_plan import Chunk

if TYPE_CHECKING:
    pass


@dataclass(slots=True)
class ChunkRead:
    """Whole stretches of a chunk, from byte ``start`` to ``end``, that another rank sends, and the part they are for.

    is_direct: they go into the part's tensor as they are; else into a room, and from there when all is right.
    """

    number: int
    start: int
    end: int
    chunk: Chunk
    part: LoadTarget
    is_direct: bool
    _room: torch.Tensor | None = None

    @property
    def num_checksum_blocks(self) -> int:
        return -(-(self.end - self.start) // CHECKSUM_BLOCK)

    def buffer(self) -> torch.Tensor:
        if self.is_direct:
            memory, (first, _) = self.part.direct_view(self.chunk), self.part.byte_range(self.chunk)
            assert memory is not None
            return memory[self.start - first : self.end - first]
        self._room = torch.empty(self.end - self.start, dtype=torch.uint8)
        return self._room

    def copy_from_buffer(self) -> None:
        """Take to its place what is in a room."""
        if self._room is not None:
            copy_bytes(self._room, self.start, self.chunk, self.part)
            self._room = None


def chunk_reads(number: int, chunk: Chunk, part: LoadTarget) -> Iterator[ChunkRead]:
    """Divide what a part needs into what goes straight into its tensor and what, at either end, holds more than the part."""
    first, last = part.byte_range(chunk)
    start, end = (
        first // CHECKSUM_BLOCK * CHECKSUM_BLOCK,
        min(-(-last // CHECKSUM_BLOCK) * CHECKSUM_BLOCK, chunk.num_bytes),
    )
    cuts = [start, end]
    inner_start, inner_end = (
        -(-first // CHECKSUM_BLOCK) * CHECKSUM_BLOCK,
        end if end == last else last // CHECKSUM_BLOCK * CHECKSUM_BLOCK,
    )
    is_split = part.direct_view(chunk) is not None and inner_start < inner_end
    if is_split:
        cuts = [start, inner_start, inner_end, end]
    for left, right in pairwise(cuts):
        if left < right:
            yield ChunkRead(number, left, right, chunk, part, is_split and left == inner_start)


def copy_bytes(raw: torch.Tensor, start: int, chunk: Chunk, part: LoadTarget) -> None:
    """Take to a part what of it lies in these bytes of the chunk, from byte ``start`` on: all of it, if the part must be converted."""
    first, last = part.byte_range(chunk)
    left, right = max(first, start), min(last, start + raw.numel())
    memory = part.direct_view(chunk)
    if memory is None:
        part.fill_from_bytes(raw[left - start : right - start], chunk)
    else:
        memory[left - first : right - first].copy_(raw[left - start : right - start])


def copy_and_verify(raw: torch.Tensor, chunk: Chunk, part: LoadTarget, sums: Sequence[int]) -> bool:
    """Copy a part of a chunk to where it belongs; gives whether the sums of what has arrived there, or was copied from, are right."""
    is_right = True
    for piece in chunk_reads(0, chunk, part):
        place = piece.buffer() if piece.is_direct else None
        for start in range(piece.start, piece.end, CHECKSUM_BLOCK):
            block = raw[start : min(start + CHECKSUM_BLOCK, piece.end)]
            if place is not None:
                block = place[start - piece.start :][: len(block)].copy_(block)
            is_right &= checksum(block) == sums[start // CHECKSUM_BLOCK]
        if place is None:
            copy_bytes(raw[piece.start : piece.end], piece.start, chunk, part)
    return is_right


def verify_stream(
    size: int, wanted: Callable[[], list[int]], at_end: Callable[[bool], None]
) -> Callable[[torch.Tensor], None]:
    """Add up ``size`` bytes as they arrive in blocks, stretch by stretch, and tell at the end whether the sums are right.

    wanted: gives those; asked at the end.
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
