"""The place of one rank in a world: what decides its part of the data and of a checkpoint. Importing it loads no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankInWorld:
    """One rank, the number of ranks, and how a full batch is divided among them.

    rank: 0 to world_size - 1. local_sizes: samples of a full batch for each rank, in rank order; empty for an even split.
    For data both count data-parallel ranks, for checkpoints all ranks.
    """

    rank: int
    world_size: int
    local_sizes: tuple[int, ...] = ()

    @classmethod
    def current(cls) -> RankInWorld:
        """Give this process's place in the default process group, rank 0 of 1 where there is none. Not a collective."""
        dist = sys.modules.get("torch.distributed")
        if dist is not None and dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        return cls(0, 1)
