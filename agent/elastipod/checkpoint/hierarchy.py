"""Collectives over two levels: no rank holds more connections or receives more than it needs.

Neighbouring ranks, of whole nodes, form subgroups; the first rank of a subgroup leads it. Messages go to the leader, from
the leaders to rank 0, and results the same way back. With subgroups of about the square root of the world size, a rank has
about 2 * sqrt(world_size) connections at most, and only rank 0 receives from all. A small world is one subgroup.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_FLAT_RANKS = 16  # up to this size a world is one subgroup
SUBGROUP_MULTIPLE = 8  # subgroup sizes are multiples of it, so that they consist of whole nodes


class Collectives(Protocol):
    """Collective operations among some ranks, numbered from 0. All of them make every call."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks, by rank, on rank 0; an empty list elsewhere."""

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's data on every rank."""

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return to each rank its part of what rank 0 has."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The division of a world into subgroups of neighbouring ranks."""

    world_size: int
    size: int

    @classmethod
    def of(cls, world_size: int) -> Hierarchy:
        if world_size <= MAX_FLAT_RANKS:
            return cls(world_size, world_size)
        return cls(
            world_size, min(math.ceil(math.sqrt(world_size) / SUBGROUP_MULTIPLE) * SUBGROUP_MULTIPLE, world_size)
        )

    @property
    def leaders(self) -> range:
        return range(0, self.world_size, self.size)

    def members(self, rank: int) -> range:
        """Return the ranks in the subgroup of a rank."""
        first = rank - rank % self.size
        return range(first, min(first + self.size, self.world_size))


class HierarchicalCollectives:
    """Collectives by way of leaders. leaders: None on ranks that lead no subgroup, and if there is one subgroup only."""

    def __init__(self, subgroup: Collectives, leaders: Collectives | None) -> None:
        self._subgroup, self._leaders = subgroup, leaders

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks, by rank, on rank 0; an empty list elsewhere."""
        received = self._subgroup.gather(data)
        if self._leaders is None:
            return received
        return [each for subgroup in self._leaders.gather(_join(received)) for each in _split(subgroup)]

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's data on every rank."""
        return self._subgroup.broadcast(data if self._leaders is None else self._leaders.broadcast(data))

    def scatter(self, parts: Sequence[bytes], hierarchy: Hierarchy) -> bytes:
        """Return to each rank its part of what rank 0 has, by rank."""
        if self._leaders is None:
            return self._subgroup.scatter(parts)
        of_subgroups = [
            _join([parts[rank] for rank in hierarchy.members(leader)]) for leader in hierarchy.leaders if parts
        ]
        return self._subgroup.scatter(_split(self._leaders.scatter(of_subgroups)))


def _join(parts: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{len(parts) + 1}Q", len(parts), *map(len, parts)) + b"".join(parts)


def _split(data: bytes) -> list[bytes]:
    (count,) = struct.unpack_from("<Q", data)
    end = 8 * (count + 1)
    parts: list[bytes] = []
    for length in struct.unpack_from(f"<{count}Q", data, 8):
        parts.append(data[end : end + length])
        end += length
    return parts
