"""A chunk: a rectangular part of a tensor, as one rank holds it. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

StatePath = tuple[str | int, ...]  # of a tensor or value in the nested state
ChunkIndex = tuple[str, tuple[int, ...]]  # the tensor's key and the chunk's offsets in it


@dataclass(frozen=True, slots=True)
class Chunk:
    """A rectangular part of a tensor. path: of the tensor in the nested state; dtype: torch's name, such as float32."""

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
        """Number of elements in the chunk."""
        return math.prod(self.sizes)
