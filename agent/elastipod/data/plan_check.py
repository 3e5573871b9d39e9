"""Do all ranks train on one plan, each on a part of its own? Asked once per process group, before its first batch.

A seed made of the rank, a file that is longer on one node, a local rank taken for the global one: each trains some samples
twice and others never, and nothing else would notice before an audit. Asked of the group's store, where whoever comes first
writes and the others compare, and not by a collective: nobody waits, and a rank that never asks holds nobody up.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from elastipod.errors import DataError
from elastipod.local_worker import store_generation


class CompareSetStore(Protocol):
    """A store of torch. compare_set: with nothing expected, sets what is not there yet and gives what is there then."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class _CheckedGroup(NamedTuple):
    """The process group that was asked last. number: of those of one generation, which may share a store."""

    group: weakref.ref[object]
    generation: int
    number: int


_checked: _CheckedGroup | None = None


def check_same_plan(plan: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Raise DataError when another rank came first with another plan, or with this very rank.

    plan: JSON values that are the same on all ranks. Does nothing without torch.distributed, nor where ``world_size`` is not
    that of its default group: with model parallelism, or for a rank that reads something by itself.
    """
    global _checked
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != world_size:
        return
    group, generation = dist.group.WORLD, store_generation()
    if world_size == 1 or (_checked is not None and _checked.group() is group):
        return
    number = _checked.number + 1 if _checked is not None and _checked.generation == generation else 0
    _checked = _CheckedGroup(weakref.ref(group), generation, number)
    c10d = dist.distributed_c10d
    if (store := c10d._get_default_store()) is not None:  # MPI has none
        check_in_store(c10d.PrefixStore(f"elastipod-data/{generation}/{number}", store), plan, rank, dist.get_rank())


def check_in_store(store: CompareSetStore, plan: Mapping[str, Any], rank: int, process: int) -> None:
    """Do it in a store of one group. rank: that the plan is iterated for; process: rank of this process in the group."""
    mine = json.dumps(plan)
    first = json.loads(store.compare_set("plan", "", mine))
    differing = [name for name, value in json.loads(mine).items() if first.get(name) != value]
    if differing:
        name = differing[0]
        raise DataError(
            f"rank {process} would train on other data than the ranks that came first: {name} is {plan[name]!r} here and "
            f"{first.get(name)!r} there; make the same plan on every rank, with nothing in it that follows from the rank"
        )
    owner = int(store.compare_set(f"rank/{rank}", "", str(process)))
    if owner != process:
        raise DataError(
            f"the processes of ranks {owner} and {process} would both train on the samples of rank {rank}; give each its own "
            "global rank, not its local one"
        )
