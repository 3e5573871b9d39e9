"""How the samples of a global batch are shared out to the ranks: each once, in rank order, whatever the world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


def even_part(size: int, rank: int, world_size: int) -> range:
    """Give the part of ``size`` samples that one rank owns, as a half-open range.

    Over all ranks the ranges cover 0..size once, in rank order, and differ by at most one sample; ranks beyond the size
    get none. Raises ValueError when the rank is outside the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    return range(size * rank // world_size, size * (rank + 1) // world_size)


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """One way to share out: evenly, or in proportion to `bounds`; only whole groups of ``grain`` samples are handed out.

    bounds: the sums of the local sizes before each rank, and of all; empty for an even split. A batch of that sum gives
    each rank exactly its local size; a shorter one, such as the last of an epoch, is cut in the same proportions.
    grain: samples that stay together, counted from the beginning of the batch; the batch's last group may be short.
    """

    world_size: int
    grain: int = 1
    bounds: tuple[int, ...] = ()

    @classmethod
    def of(cls, world_size: int, local_sizes: Sequence[int] = (), grain: int = 1) -> BatchSplit:
        """Check and make a split. local_sizes: of every rank, by rank; none: evenly. Raises ValueError."""
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; there is at least one rank")
        if grain < 1:
            raise ValueError(f"grain is {grain}; a group holds at least one sample")
        if not local_sizes:
            return cls(world_size, grain)
        if len(local_sizes) != world_size:
            raise ValueError(
                f"local_sizes has {len(local_sizes)} entries for a world of {world_size}; give one per rank"
            )
        if min(local_sizes) < 0 or not sum(local_sizes):
            raise ValueError("local_sizes must not be negative, and some rank must have samples")
        if uneven := [size for size in local_sizes if size % grain]:
            raise ValueError(f"a local size of {uneven[0]} is no multiple of the grain of {grain}")
        return cls(world_size, grain, (0, *accumulate(local_sizes)))

    def part(self, size: int, rank: int) -> range:
        """Give the samples of a batch of ``size`` that belong to a rank. Raises ValueError for a rank outside the world."""
        groups = (
            even_part(-(-size // self.grain), rank, self.world_size) if not self.bounds else self._groups(size, rank)
        )
        return range(min(groups.start * self.grain, size), min(groups.stop * self.grain, size))

    def largest(self, size: int) -> int:
        """Give the size of the largest part of a batch of ``size``: what the number of passes follows from."""
        if not self.bounds:
            groups, more = divmod(-(-size // self.grain), self.world_size)
            of_others = (groups + (more > 1)) * self.grain if self.world_size > 1 else 0
            return max(
                of_others, len(self.part(size, self.world_size - 1))
            )  # the last rank has the group that may be short
        cuts = [min(self._cut(size, bound) * self.grain, size) for bound in self.bounds]
        return max(end - first for first, end in pairwise(cuts))

    def _groups(self, size: int, rank: int) -> range:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        return range(self._cut(size, self.bounds[rank]), self._cut(size, self.bounds[rank + 1]))

    def _cut(self, size: int, bound: int) -> int:
        return -(-size // self.grain) * bound // self.bounds[-1]
