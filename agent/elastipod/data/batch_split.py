"""Divides the samples of a global batch among the ranks: each sample once, in rank order, for any world size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from elastipod.data.sources import as_int


def even_part(size: int, rank: int, world_size: int) -> range:
    """Give the samples, of ``size``, that one rank owns in an even split, as a half-open range.

    Over all ranks the ranges cover 0..size once, in rank order, and their lengths differ by at most one. With fewer samples than
    ranks some ranges are empty. Raises ValueError when the rank is outside the world.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size}")
    return range(size * rank // world_size, size * (rank + 1) // world_size)


def as_cut(grain: object, local_sizes: Sequence[object]) -> tuple[int, tuple[int, ...]]:
    """Give both as whole numbers. Raises TypeError, with the argument's name, for anything else."""
    if isinstance(local_sizes, (str, bytes)) or not isinstance(local_sizes, Iterable):
        raise TypeError(f"local_sizes is {local_sizes!r:.80}; it must have a whole number for each rank")
    sizes = tuple(as_int(f"local_sizes[{rank}]", size) for rank, size in enumerate(local_sizes))
    return as_int("grain", grain), sizes


@dataclass(frozen=True, slots=True)
class BatchSplit:
    """A way to divide batches: evenly, or in proportion to local sizes.

    bounds: sum of the local sizes before each rank, then of all; empty for an even split. A full batch gives each rank exactly
    its local size; a shorter batch, such as the last of an epoch, is divided in the same proportions.
    grain: samples that stay together, counted from the beginning of the batch; the last group may be short.
    """

    world_size: int
    grain: int = 1
    bounds: tuple[int, ...] = ()

    @classmethod
    def of(cls, world_size: int, local_sizes: Sequence[int] = (), grain: int = 1) -> BatchSplit:
        """Give the split for local sizes in rank order; empty: an even split.

        Raises ValueError when they do not fit, and TypeError for what is no whole number.
        """
        grain, local_sizes = as_cut(grain, local_sizes)
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
            raise ValueError(f"a local size of {uneven[0]} is not a multiple of the grain of {grain}")
        return cls(world_size, grain, (0, *accumulate(local_sizes)))

    def part(self, size: int, rank: int) -> range:
        """Give a rank's part of a batch of ``size`` samples. Raises ValueError for a rank outside the world."""
        groups = (
            even_part(-(-size // self.grain), rank, self.world_size) if not self.bounds else self._groups(size, rank)
        )
        return range(min(groups.start * self.grain, size), min(groups.stop * self.grain, size))

    def largest(self, size: int) -> int:
        """Give the size of the largest part of a batch of ``size`` samples, which decides the number of passes."""
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
