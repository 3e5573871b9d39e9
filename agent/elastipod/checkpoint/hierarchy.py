"""Words from every rank to rank 0 and back, by way of team leaders: no rank hears more than it needs, or holds more connections.

Ranks form teams of neighbours, of whole nodes; the first of a team leads it. What ranks say goes to their leader, from the leaders to
rank 0, and what rank 0 makes of it the same way back. With teams of about the square root of the world, a rank has some
2 * sqrt(world) connections at most, and only rank 0 sees what all have said. Small worlds are one team.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

MAX_FLAT_RANKS = 16  # ranks; up to here a world is one team
SUBGROUP_MULTIPLE = 8  # teams are multiples of it, so that they are made of whole nodes


class Collectives(Protocol):
    """Connections among some ranks, numbered from 0 within the link. Every call is collective among them."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """Give everyone's data, by rank, on rank 0; nothing elsewhere."""

    def broadcast(self, data: bytes) -> bytes:
        """Give rank 0's data on every rank."""

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Give each rank its part of what rank 0 has."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """The division of a world into teams of neighbours."""

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
        """Give the team of a rank."""
        first = rank - rank % self.size
        return range(first, min(first + self.size, self.world_size))


class HierarchicalCollectives:
    """One rank's way to rank 0. leaders: None on ranks that lead no team, and where there is one team."""

    def __init__(self, subgroup: Collectives, leaders: Collectives | None) -> None:
        self._subgroup, self._leaders = subgroup, leaders

    def gather(self, data: bytes) -> list[bytes]:
        """Give what every rank said, by rank, on rank 0; nothing elsewhere."""
        said = self._subgroup.gather(data)
        if self._leaders is None:
            return said
        return [each for subgroup in self._leaders.gather(_join(said)) for each in _split(subgroup)]

    def broadcast(self, data: bytes) -> bytes:
        """Give rank 0's data on every rank."""
        return self._subgroup.broadcast(data if self._leaders is None else self._leaders.broadcast(data))

    def scatter(self, parts: Sequence[bytes], hierarchy: Hierarchy) -> bytes:
        """Give each rank its part of what rank 0 has, by rank."""
        if self._leaders is None:
            return self._subgroup.scatter(parts)
        of_teams = [_join([parts[rank] for rank in hierarchy.members(leader)]) for leader in hierarchy.leaders if parts]
        return self._subgroup.scatter(_split(self._leaders.scatter(of_teams)))


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
