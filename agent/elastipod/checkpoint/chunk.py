"""A chunk: a box of one tensor, as one rank holds it. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

StatePath = tuple[str | int, ...]  # of a tensor or value in the nested state
ChunkIndex = tuple[str, tuple[int, ...]]  # which chunk: the tensor's key and the offsets in it


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor. path: of the tensor in the nested state; dtype: as torch names it, such as float32; num_bytes: of the box."""

    key: str
    path: StatePath
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int

    @property
    def index(self) -> ChunkIndex:
        return self.key, self.offsets

    @property
    def num_items(self) -> int:
        """Numbers that the box holds."""
        return math.prod(self.sizes)
