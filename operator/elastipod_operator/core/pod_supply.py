"""Create the pods that are missing and delete those that are not wanted."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from .actions import Action, CreatePod
from .avoided_nodes import nodes_to_avoid
from .backoff import doubled
from .context import Context, PlanDraft
from .grant import Grant
from .incarnations import newest_incarnations
from .leavers import slots_for_shards
from .names import PodId, Slot
from .partial_gangs import restrict_slots
from .payback import growth_hold
from .pod_listing import list_while_leaving, list_while_waiting
from .pod_removal import remove, remove_unwanted
from .quota_requests import slots_backing_off
from .ranks import count_trainable
from .record import Record, TransitionKind
from .replica import Health, Replica, Replicas
from .requested_pods import requested_pods
from .slots import base_first, is_placed, spare_slots, wanted_slots
from .snapshot import Policy
from .time_order import earliest, latest

# How long a pod that is needed for training stays pending before a spare is deleted to make room.
SPARE_PATIENCE = timedelta(seconds=60)


@dataclass(frozen=True, slots=True, kw_only=True)
class CreationLimits:
    """What delays or restricts the creation of pods.

    avoids: nodes that new pods avoid. pod_creation_retry_at: end of the back-off after the API server refused a pod. growth_until:
    until then growth would not pay off. only_spare: slots whose pods may use spare capacity only, on the nodes only_on. spares: the
    slots of spares, None to compute them; they wait while spares_wait.
    """

    avoids: tuple[str, ...] = ()
    pod_creation_retry_at: datetime | None = None
    growth_until: datetime | None = None
    only_spare: frozenset[Slot] = frozenset()
    only_on: tuple[str, ...] = ()
    spares: frozenset[Slot] | None = None
    spares_wait: bool = False


def supply_pods(
    record: Record, context: Context, wanted: list[Slot], limits: CreationLimits
) -> tuple[list[Action], datetime | None]:
    """Create the pods that are missing in the wanted slots, and delete those that are no longer wanted.

    Gives the actions, and when the next creation is due (after the back-off). A failed creation is repeated with the same name.
    With a queue, a replacement waits until its predecessor is gone: both together would exceed the granted quota.
    """
    policy, grant, replicas, now = context.policy, context.grant, context.replicas, context.now
    actions: list[Action] = []
    wakes: list[datetime] = []
    nnodes = len(record.members) or grant.sizes.start
    members = frozenset(record.members)
    in_use = {member.slot for member in members} if record.transition is None else set(wanted)
    misplaced = _outdated_placement(replicas, limits)
    taken = _still_on_quota(replicas, misplaced) if grant.workloads is not None else {}
    newest = newest_incarnations(record, replicas)
    spares = spare_slots(grant, wanted) if limits.spares is None else limits.spares
    all_placed = not limits.spares_wait and all(is_placed(replicas.newest.get(s)) for s in wanted if s not in spares)
    for slot in wanted:
        replica = replicas.newest.get(slot)
        if replica is not None and replica.may_train and slot not in misplaced:
            continue
        if slot in spares and not all_placed:
            continue  # a spare must not take the node of a pod that would train
        if slot in taken:
            if slot in misplaced:
                actions += remove(taken[slot], "pending with an outdated list of nodes")
            continue
        is_member = replica is not None and replica.id in members
        due = latest(
            replacement_due(replica, record, policy, is_member=is_member)
            if replica is not None and slot not in misplaced
            else None,
            limits.pod_creation_retry_at,
            limits.growth_until if slot not in in_use else None,
        )
        if due is not None and due > now:
            wakes.append(due)
            continue
        pod = PodId(slot.spec, slot.ordinal, newest.get(slot, -1) + 1)
        workload = grant.workloads.get(slot, "") if grant.workloads is not None else ""
        only_on = limits.only_on if slot in limits.only_spare else ()
        failures = _failures_before_next(replica, is_member=is_member, is_misplaced=slot in misplaced)
        actions.append(CreatePod(pod, nnodes, record.generation, limits.avoids, workload, only_on, failures))
    if (due := _spares_leave_at(grant, record, replicas, wanted, spares)) is not None:
        if due > now:
            wakes.append(due)
        else:
            wanted = [slot for slot in wanted if slot not in spares]
    removals, leavers_go_at = remove_unwanted(set(wanted), record, replicas, policy, now)
    return actions + removals, earliest(*wakes, leavers_go_at)


def _spares_leave_at(
    grant: Grant, record: Record, replicas: Replicas, wanted: list[Slot], spares: Collection[Slot]
) -> datetime | None:
    """Give when spares are deleted to make room for pods that would train; None if all have nodes or it would not help."""
    waiting = [
        r
        for s in wanted
        if s not in spares and (r := replicas.newest.get(s)) is not None and r.may_train and not r.pod.node
    ]
    members = {*record.members}
    idle = [r for s in spares if (r := replicas.newest.get(s)) is not None and is_placed(r) and r.id not in members]
    if not waiting or not idle:
        return None
    placed = [r.id for s in wanted if s not in spares and (r := replicas.newest.get(s)) is not None and is_placed(r)]
    freed = [r.id for r in waiting][: len(idle)]
    now_fits = grant.sizes.fit(count_trainable({*members, *placed}, grant))
    if grant.sizes.fit(count_trainable({*members, *placed, *freed}, grant)) <= now_fits:
        return None
    return min(r.pod.created_at for r in waiting) + SPARE_PATIENCE


def _outdated_placement(replicas: Replicas, limits: CreationLimits) -> set[Slot]:
    """Give the slots whose pods are pending with an outdated list of nodes: those to avoid, or those that had room."""
    return {
        slot
        for slot, r in replicas.newest.items()
        if r.health is Health.PENDING and not r.pod.node and r.pod.kill_at is None
        and (r.pod.avoids != limits.avoids or _is_restricted_in_vain(slot, r, limits))
    }  # fmt: skip


def _is_restricted_in_vain(slot: Slot, replica: Replica, limits: CreationLimits) -> bool:
    """Whether none of the nodes that the pod is restricted to has room now, or whether it need not be restricted any more.

    Nodes that it avoids are none, as far as their host names are those of the nodes; the others are left out when room is read.
    """
    if slot not in limits.only_spare:
        return bool(replica.pod.only_on)
    return {*replica.pod.only_on}.difference(replica.pod.avoids).isdisjoint(limits.only_on)


def _still_on_quota(replicas: Replicas, misplaced: set[Slot]) -> dict[Slot, Replica]:
    """Give the slots whose pods still use quota although they are to be replaced.

    A lost pod still uses quota while its kubelet is alive and will end it; a dead node never blocks a replacement.
    """
    return {
        r.id.slot: r
        for r in replicas.by_id.values()
        if not r.cannot_run_again
        and (r.health is Health.DISRUPTED or r.may_still_run or (r.id.slot in misplaced and r.health is Health.PENDING))
    }


def replacement_due(replica: Replica, record: Record, policy: Policy, *, is_member: bool) -> datetime | None:
    """Give when a pod may be replaced: at once the first time, then with exponential back-off from its creation.

    The back-off stops a loop of containers that exit at once, or of replacements that land on the same bad node. A pod that
    was deleted is replaced at once.
    """
    if replica.pod.kill_at is not None:
        return None
    tries = max(_failures_before(replica, is_member=is_member), record.consecutive_failures)
    if tries == 0:
        return None
    return replica.pod.created_at + doubled(policy.backoff_base, policy.backoff_max, tries)


def _failures_before(replica: Replica, *, is_member: bool) -> int:
    """Give how many pods of a slot in a row have failed before this one: none before a member, whose own failures the record counts.

    A pod of an earlier operator does not say how its predecessors ended: all of them count.
    """
    if is_member:
        return 0
    told = replica.pod.failures_before
    return replica.id.incarnation if told is None else told


def _failures_before_next(replica: Replica | None, *, is_member: bool, is_misplaced: bool) -> int:
    """Give how many pods in a row have failed before the one that replaces this replica. To delete a pod is no failure of it."""
    if replica is None or is_member:
        return 0
    if is_misplaced or replica.pod.kill_at is not None:
        return replica.pod.failures_before or 0
    return _failures_before(replica, is_member=False) + 1


def supply(draft: PlanDraft, context: Context) -> PlanDraft:
    """Add the creations and deletions that keep the wanted pods."""
    record = draft.record
    idle = record.transition is not None and record.transition.kind is TransitionKind.SUSPEND
    if record.outcome:
        return draft
    if idle or context.grant.is_suspended:
        is_leaving = any(r.pod.kill_at is not None and not r.pod.ended for r in context.replicas.by_id.values())
        return list_while_leaving(draft, context.snapshot, context.replicas, record) if is_leaving else draft
    if draft.adopts_spec and context.snapshot.job.pending_edits:
        return replace(
            draft, wake_at=context.now
        )  # pods are created from the spec in the record, so the record is written first
    wanted = _wanted(record, context)
    wanted, base_due = base_first(wanted, record, context)
    spares = frozenset(spare_slots(context.grant, wanted))
    requested = requested_pods(wanted, spares, record, context)
    capacity = context.snapshot.spare_capacity
    limits = CreationLimits(
        avoids=nodes_to_avoid(record, context),
        pod_creation_retry_at=context.snapshot.pod_creation_retry_at,
        growth_until=growth_hold(record, context.policy),
        only_spare=requested.only_spare,
        only_on=tuple(capacity.places) if capacity is not None else (),
        spares=spares,
        spares_wait=not requested.is_complete,
    )
    actions, wake = supply_pods(record, context, requested.slots, limits)
    known = {action for action in draft.actions}
    fresh = tuple(action for action in actions if action not in known)
    listing, due = list_while_waiting(record, context)
    return replace(
        draft.with_actions(*fresh, *listing),
        wake_at=earliest(draft.wake_at, wake, due, base_due, requested.read_again_at),
    )


def _wanted(record: Record, context: Context) -> list[Slot]:
    wanted = wanted_slots(context.grant, record, context.replicas)
    known = frozenset(wanted)
    wanted += [slot for slot in slots_for_shards(record, context) if slot not in known]
    if context.quota is None:
        return restrict_slots(wanted, record, context.replicas, context.grant, context.now)
    backing_off = slots_backing_off(record, context.quota, context.now)
    return [slot for slot in wanted if slot not in backing_off]
