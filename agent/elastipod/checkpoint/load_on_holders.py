"""Loading a checkpoint from memory on the ranks whose node holds all of it, for a caller who fills the other ranks from them.

Each rank works on its own, so one exchange at the end is all that the ranks say to one another. A load that divides what is read
over all nodes needs six, and connections for what it sends.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.image_inventory import ImageInventory
from elastipod.checkpoint.image_source import ImageSource, replicas_agree
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.checkpoint.open_images import open_own_images
from elastipod.checkpoint.optimizer_state import runs_no_collective
from elastipod.checkpoint.restore import Restore
from elastipod.json_records import decode, encode, json_record
from elastipod.rank_in_world import RankInWorld

log = logging.getLogger(__name__)


@json_record
@dataclass(frozen=True, slots=True)
class _RankLoad:
    """What one rank has done. has_loaded: its live state is the checkpoint's. has_changed: it is no longer what it was before."""

    has_loaded: bool = False
    has_changed: bool = False
    world_size: int = 0
    digests: Sequence[Any] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@json_record
@dataclass(frozen=True, slots=True)
class LoadOnHolders:
    """What all ranks have done. holders: the ranks that have loaded the checkpoint; none where their replicas differ.

    has_changed: the live state of some rank is no longer what it was before. world_size and extra are the checkpoint's, where there are
    holders.
    """

    holders: Sequence[int]
    has_changed: bool
    world_size: int
    extra: Mapping[str, Any]


def can_load_on_holders(restore: Restore, inventory: ImageInventory, of: CheckpointId) -> bool:
    """Return whether it is worth trying. The same on every rank."""
    has_node = any(each.node in inventory.nodes for each in inventory.images(of))
    return has_node and restore.live.stage.count == 1 and runs_no_collective(restore.live.optimizers.values())


def load_on_holders(
    directory: MemoryDirectory | None,
    inventory: ImageInventory,
    of: CheckpointId,
    restore: Restore,
    comm: Communicator,
    unmap_threads: list[threading.Thread],
) -> LoadOnHolders:
    """Load a checkpoint on the ranks whose node holds all of it. Collective, in the group of the training threads: it has their time.

    unmap_threads: receives the threads that unmap images. Raises CheckpointError on all ranks when it does not fit.
    """

    def own() -> Any:
        images = open_own_images(directory, inventory, of)
        if images is None:
            return encode(_RankLoad())
        try:
            return encode(_load(images, of, restore))
        finally:
            unmap_threads.append(images.close())

    return decode(LoadOnHolders, comm.training_all_reduce(own, _common))


def _load(images: ImageSource, of: CheckpointId, restore: Restore) -> _RankLoad:
    name = f"the checkpoint of step {of.step} in memory"
    nested = restore.nested(images)
    filling = restore.fit(name, images, nested)
    restore.has_changed = True
    if images.fill_alone(images.plan_reads(filling.targets())):
        log.warning(
            "%s is damaged on the node of rank %d, which takes another node's", name, RankInWorld.current().rank
        )
        return _RankLoad(has_changed=True)
    restore.apply(of, images, filling, nested)
    digests = images.digests(restore.replica_local)
    return _RankLoad(True, True, images.world_size, digests, images.extra)


def _common(answers: Sequence[Any]) -> Any:
    loads = [decode(_RankLoad, each) for each in answers]
    has_changed = any(each.has_changed for each in loads)
    holders = tuple(rank for rank, each in enumerate(loads) if each.has_loaded)
    if not holders or not replicas_agree([each.digests for each in loads]):
        return encode(LoadOnHolders((), has_changed, 0, {}))
    first = loads[holders[0]]
    return encode(LoadOnHolders(holders, has_changed, first.world_size, first.extra))
