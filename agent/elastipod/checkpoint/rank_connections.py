"""Connections between the ranks: to a rank's subgroup, between leaders, and between pairs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from elastipod.checkpoint.gloo_collectives import GlooCollectives
from elastipod.checkpoint.hierarchy import HierarchicalCollectives, Hierarchy

SILENCE_TIMEOUT_S = 60.0  # wait for another rank's next message or block


class RankConnections:
    """One rank's connections: to its subgroup, to the other leaders if it is one, and to other ranks on demand."""

    def __init__(self, store: Any, rank: int, hierarchy: Hierarchy) -> None:
        """Connect. Raises RuntimeError when other ranks do not."""
        self._store, self._rank, self._members = store, rank, hierarchy.members(rank)
        leader = self._members[0]
        self._subgroup = self._connect(f"subgroup {leader}", self._members)
        leads = rank == leader and len(hierarchy.leaders) > 1
        self.collectives = HierarchicalCollectives(
            self._subgroup, self._connect("leaders", hierarchy.leaders) if leads else None
        )
        self._pairs: dict[int, GlooCollectives] = {}

    def to(self, other: int) -> tuple[Any, int]:
        """Return a group that contains another rank, and its rank in that group; connects first if necessary."""
        if other in self._members:
            return self._subgroup.group, self._members.index(other)
        pair = sorted((self._rank, other))
        if other not in self._pairs:
            self._pairs[other] = self._connect(f"pair {pair}", pair)
        return self._pairs[other].group, pair.index(other)

    def _connect(self, name: str, ranks: Sequence[int]) -> GlooCollectives:
        store = dist.distributed_c10d.PrefixStore(name, self._store)
        return GlooCollectives.connect(store, ranks.index(self._rank), len(ranks), SILENCE_TIMEOUT_S)


def training_collectives(
    rank: int, hierarchy: Hierarchy, *, on_default_group: bool
) -> tuple[HierarchicalCollectives, list[Any]]:
    """Create torch's own groups for the training threads; return them too. They end with the job's other groups at the latest.

    on_default_group: use that where one group is enough; it must carry tensors of the host by gloo. Every rank creates every group, even
    those that it is not in: torch names groups by counting them.
    """
    if on_default_group and len(hierarchy.leaders) == 1:
        # Peers see the end of a world when its group closes, so nothing here may keep that alive.
        shared = weakref.proxy(dist.group.WORLD)
        return HierarchicalCollectives(GlooCollectives(shared, rank, hierarchy.world_size), None), []
    members = {leader: hierarchy.members(leader) for leader in hierarchy.leaders}
    links: dict[Sequence[int], GlooCollectives] = {}
    for ranks in dict.fromkeys([*members.values(), hierarchy.leaders]):
        group = dist.new_group(list(ranks), backend="gloo") if len(ranks) > 1 else None
        if rank in ranks:
            links[ranks] = GlooCollectives(group, ranks.index(rank), len(ranks))
    leads = rank in hierarchy.leaders and len(hierarchy.leaders) > 1
    collectives = HierarchicalCollectives(links[hierarchy.members(rank)], links[hierarchy.leaders] if leads else None)
    return collectives, [link.group for link in links.values() if link.group is not None]
