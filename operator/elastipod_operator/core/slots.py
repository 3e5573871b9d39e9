"""Which slots should hold a pod."""

from __future__ import annotations

from datetime import datetime, timedelta

from .context import Context
from .grant import Grant
from .names import Slot
from .ranks import base_minimum
from .record import Record, TransitionKind
from .replica import Health, Replica, Replicas


def wanted_slots(grant: Grant, record: Record, replicas: Replicas) -> list[Slot]:
    """Give the slots that should hold a pod: as many as the largest allowed size, and the spares of each spec in use.

    Within a spec, slots of members come first, then those of pods that may train, then the lowest ordinals. The base spec is
    filled first. With a queue, only slots that have quota count.
    """
    members = {member.slot for member in record.members}
    left = grant.sizes.maximum
    wanted: list[Slot] = []
    for spec in grant.specs:
        room = min(left, spec.limit)
        known = {slot for slot in (*replicas.newest, *members) if slot.spec == spec.name}
        slots = known | {Slot(spec.name, ordinal) for ordinal in range(room + spec.spares)}
        if grant.workloads is not None:
            slots = {slot for slot in grant.workloads if slot.spec == spec.name}

        def key(slot: Slot) -> tuple[bool, int, int]:
            return slot not in members, _distance(replicas.newest.get(slot)), slot.ordinal

        wanted += sorted(slots, key=key)[: room + spec.spares if room else 0]
        left -= room
    return wanted


def _distance(replica: Replica | None) -> int:
    """Rank a slot by how close it is to training: 0 its pod runs, 1 its pod is starting, 2 it has no usable pod."""
    if replica is None or not replica.may_train:
        return 2
    return 1 if replica.health is Health.PENDING and not replica.pod.started else 0


def is_placed(replica: Replica | None) -> bool:
    """Whether there is a usable pod that has a node."""
    return replica is not None and replica.may_train and bool(replica.pod.node)


def spare_slots(grant: Grant, wanted: list[Slot]) -> set[Slot]:
    """Give the slots beyond those that may train: the last ones of each spec, in the order of `wanted`."""
    left = grant.sizes.maximum
    spares: set[Slot] = set()
    for spec in grant.specs:
        room = min(left, spec.limit)
        spares.update([slot for slot in wanted if slot.spec == spec.name][room:])
        left -= room
    return spares


# How long a pod of the base spec stays pending before one of the elastic spec is deleted to make room.
BASE_PATIENCE = timedelta(seconds=60)


# After a fault the wait is faultyScaleDownTimeoutInSeconds, but at least this long, because a scheduler may be slow.
LEAST_PATIENCE = timedelta(seconds=5)


def base_first(wanted: list[Slot], record: Record, context: Context) -> tuple[list[Slot], datetime | None]:
    """Leave out elastic pods whose nodes the base spec needs, or give when that is due.

    Only between two generations, when the job cannot train without the base. Pending elastic pods leave too, or the scheduler
    might give them the freed nodes. All are wanted again once the pods of the base have nodes.
    """
    base = [slot for slot in wanted if slot.spec == context.grant.specs[0].name]
    elastic = [slot for slot in wanted if slot.spec != context.grant.specs[0].name]
    pods = _living(base, context.replicas)
    waiting = [r for r in pods if not r.pod.node]
    lacking = min(len(waiting), base_minimum(context.grant) - (len(pods) - len(waiting)))
    transition = record.transition
    if transition is None or lacking <= 0 or not elastic:
        return wanted, None
    is_shrink = transition.kind is TransitionKind.RECOVERY and not transition.recreates_pods
    patience = max(LEAST_PATIENCE, context.policy.faulty_timeout) if is_shrink else BASE_PATIENCE
    due = min(r.pod.created_at for r in waiting) + patience
    if context.now < due:
        return wanted, due
    holding = [r.id.slot for r in _living(elastic, context.replicas) if r.pod.node]
    return [*base, *holding[: max(0, len(holding) - lacking)]], None


def _living(slots: list[Slot], replicas: Replicas) -> list[Replica]:
    found = (replicas.newest.get(slot) for slot in slots)
    return [r for r in found if r is not None and r.may_train]
