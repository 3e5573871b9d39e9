"""Checks once per process group, before its first batch, that all ranks have the same plan and different ranks.

A seed derived from the rank, a file that is longer on one node, or a local rank used as the global one makes some samples train
twice and others never, and only an audit would notice. The check uses the group's store: the first rank writes its plan and
the others compare. It is not a collective, so no rank waits for another.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from elastipod.errors import DataError
from elastipod.local_worker import store_generation
from elastipod.rank_in_world import RankInWorld


class CompareSetStore(Protocol):
    """A store of torch. compare_set with an empty ``expected`` sets a missing key, and gives the value that is there then."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class _CheckedGroup(NamedTuple):
    """The process group that was checked last. number: among the groups of one generation, which may share a store."""

    group: weakref.ref[object]
    generation: int
    number: int


_checked: _CheckedGroup | None = None


def check_same_plan(plan: Mapping[str, Any], place: RankInWorld) -> None:
    """Raise DataError when another process came first with a different plan, or with the same rank.

    plan: JSON values that must be equal on all ranks. Does nothing without torch.distributed, nor when ``place.world_size`` is
    not that of the default group: with model parallelism, or when a rank reads something by itself.
    """
    global _checked
    dist = sys.modules.get("torch.distributed")
    if (
        dist is None
        or not dist.is_available()
        or not dist.is_initialized()
        or dist.get_world_size() != place.world_size
    ):
        return
    group, generation = dist.group.WORLD, store_generation()
    if place.world_size == 1 or (_checked is not None and _checked.group() is group):
        return
    number = _checked.number + 1 if _checked is not None and _checked.generation == generation else 0
    _checked = _CheckedGroup(weakref.ref(group), generation, number)
    from elastipod.torch_compat import default_group_store

    store = default_group_store(f"elastipod-data/{generation}/{number}")
    if store is not None:
        check_in_store(store, plan, place.rank, dist.get_rank())


def check_in_store(store: CompareSetStore, plan: Mapping[str, Any], rank: int, process: int) -> None:
    """Check in the store of one group. rank: the rank that iterates the plan. process: rank of this process in the group."""
    mine = json.dumps(plan)
    first = json.loads(store.compare_set("plan", "", mine))
    differing = [name for name, value in json.loads(mine).items() if first.get(name) != value]
    if differing:
        name = differing[0]
        raise DataError(
            f"rank {process} would train on other data than the ranks that came first: {name} is {plan[name]!r} here and "
            f"{first.get(name)!r} there; make the same plan on every rank, with nothing in it that depends on the rank"
        )
    owner = int(store.compare_set(f"rank/{rank}", "", str(process)))
    if owner != process:
        raise DataError(
            f"the processes of ranks {owner} and {process} would both train on the samples of rank {rank}; give each its own "
            "global rank, not its local one"
        )
