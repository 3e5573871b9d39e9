"""What is modelled: the size of the world, its layout, its copies, how many faults there may be, and which rule is broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from elastipod.checkpoint.save_plan import choose_copy_holders
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.parts import parts_of

REPLICATED = frozenset({0})
"""The only part of a replicated state."""


class Optimizer(StrEnum):
    """Whether the optimizer of a sharded state runs without a world: the same on all ranks, unless the model leaves it open."""

    ALONE = "alone"
    NEEDS_PEERS = "needs its peers"
    EITHER = "either, and on each rank for itself"


@dataclass(frozen=True, slots=True)
class Rules:
    """What is modelled, and what a mutant breaks.

    size: ranks. last_step: where training ends. num_faults: how many there may be. resize_to: a planned change to this size, which may
    come at any time; the present size: one rank is replaced. mesh: of a sharded state; None: every rank holds all of it (DDP). every:
    steps between two copies of shards; 0: no copies. breaks: what is left out. is_reduced: whether interleavings are left out that
    cannot show anything else (docs/design/in-memory-proof.md).
    """

    size: int = 3
    last_step: int = 1
    num_faults: int = 1
    resize_to: int = 0
    mesh: MeshPlan | None = None
    every: int = 0
    optimizer: Optimizer = Optimizer.EITHER
    breaks: frozenset[str] = frozenset()
    is_reduced: bool = True

    @property
    def is_sharded(self) -> bool:
        return self.mesh is not None

    @property
    def num_holders(self) -> int:
        """Ranks that hold each part, at the smallest size; so many faults at a time may take all of them."""
        sizes = {self.size, self.resize_to or self.size}
        if self.mesh is None:
            return min(sizes)
        return min(max(size // self.num_shards(size), 2 if self.every else 1) for size in sizes)

    @property
    def num_staying(self) -> int:
        """Ranks that a planned change leaves in the job, the first ones. Where it keeps the size, the last one is replaced."""
        return min(self.resize_to, self.size - (self.resize_to == self.size))

    @property
    def most_repeated(self) -> int:
        """The steps that a crash may repeat. Where each part has one holder, those since the last copy."""
        return max(1, self.every)

    def num_shards(self, size: int) -> int:
        """Give the number of ranks that hold the state once; 0 for a replicated one."""
        return self.mesh.num_shards(size) if self.mesh is not None else 0

    def part(self, rank: int, size: int) -> int:
        """Give the part that a rank of a world holds."""
        return self.mesh.part(rank, size) if self.mesh is not None else 0

    def layout(self, num_shards: int) -> frozenset[int]:
        """Give all parts of a layout."""
        return parts_of(num_shards) if num_shards else REPLICATED

    def copy_holders(self, size: int) -> Mapping[int, int]:
        """Give the rank that holds the copy of each rank; empty where a world of this size makes none."""
        if not self.every or self.num_shards(size) < size or "no copies" in self.breaks:
            return {}
        return _holders_on_own_nodes(size)


@cache
def _holders_on_own_nodes(size: int) -> Mapping[int, int]:
    return choose_copy_holders([f"node {rank}" for rank in range(size)], [""] * size)
