"""Which of the missing pods are requested. A pending pod makes an autoscaler add nodes, so growth must not request more than it may.

The job always requests `replicas`. What it requests beyond them is up to `spec.elastipod.growth`. With a queue, quota decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from .context import Context
from .growth_mode import GrowthMode
from .names import Slot
from .ranks import base_minimum
from .record import Record
from .replica import Health
from .sizes import Sizes
from .slots import is_placed
from .snapshot import SpareCapacity

# How long what was read of the nodes is used. Reading costs a call for each node that may have room.
READ_EVERY = timedelta(seconds=30)


@dataclass(frozen=True, slots=True)
class RequestedPods:
    """Slots that should hold a pod, and those of them whose pods may use spare capacity only.

    is_complete: nothing of what the job may grow to was left out. read_again_at: when the spare capacity is read again.
    """

    slots: list[Slot]
    only_spare: frozenset[Slot] = frozenset()
    is_complete: bool = True
    read_again_at: datetime | None = None


def requested_pods(wanted: list[Slot], spares: Collection[Slot], record: Record, context: Context) -> RequestedPods:
    """Choose from the wanted slots, in their order. Pods that have a node are always kept."""
    mode, grant, replicas = context.policy.growth, context.grant, context.replicas
    if mode is GrowthMode.MAXIMUM or context.quota is not None:
        return RequestedPods(wanted)
    trains = [slot for slot in wanted if slot not in spares]
    members = {member.slot for member in record.members}
    kept = members if mode is GrowthMode.NEXT_INCREMENT else set()
    held = [slot for slot in trains if slot in kept or is_placed(replicas.newest.get(slot))]
    known = {*held}
    others = [slot for slot in trains if slot not in known]
    start = grant.sizes.start
    read_again_at = None
    if mode is GrowthMode.NEXT_INCREMENT:
        limit = _next_size(grant.sizes, sum(slot in members or not _is_unproven(slot, context) for slot in held))
    else:
        capacity = context.snapshot.spare_capacity
        placed = {r.pod.name for r in replicas.newest.values() if is_placed(r)}
        limit = grant.sizes.fit(len(held) + places_left(capacity, placed))
        read_again_at = capacity.read_at + READ_EVERY if capacity is not None and others else None
    base = grant.specs[0]
    lacks = base_minimum(grant) - sum(slot.spec == base.name for slot in held)
    number = max(max(limit, start) - len(held), lacks, 0)
    chosen = others[:number]
    only_spare: frozenset[Slot] = frozenset()
    if mode is GrowthMode.SPARE_CAPACITY_ONLY:
        only_spare = frozenset(chosen[max(start - len(held), lacks, 0) :])
    requested = {*known, *chosen, *spares}
    slots = [slot for slot in wanted if slot in requested]
    return RequestedPods(slots, only_spare, len(chosen) == len(others), read_again_at)


def _is_unproven(slot: Slot, context: Context) -> bool:
    """Whether a newcomer's node came for it and its agent has not answered yet, or something is wrong with the pod.

    Until then a further increment could be one more that an autoscaler buys in vain.
    """
    replica = context.replicas.newest[slot]
    if replica.health is Health.GOOD:
        return False
    node = context.snapshot.nodes.get(replica.pod.node)
    is_older = node is not None and node.seen_since is not None and node.seen_since <= replica.pod.created_at
    return not is_older or bool(replica.pod.problem)


def _next_size(sizes: Sizes, size: int) -> int:
    """Give the smallest allowed size above what there is, the maximum if there is none."""
    return sizes.allowed[min(bisect_right(sizes.allowed, size), len(sizes.allowed) - 1)]


def places_left(capacity: SpareCapacity | None, placed: Collection[str]) -> int:
    """Give how many more pods fit on nodes. placed: the job's pods that have a node now, by name."""
    if capacity is None:
        return 0
    return max(0, sum(capacity.places.values()) - len({*placed} - capacity.placed))
