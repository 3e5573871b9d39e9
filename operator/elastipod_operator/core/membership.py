"""Who trains with which group rank, and which pods there should be (decisions 7, 12, 19)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from .actions import Action, CreatePod, DeletePod, ShutDownAgent
from .backoff import doubled
from .base_first import lacks_base
from .health import Health, Replica, Replicas
from .names import PodId, Slot
from .record import Record
from .silence import AGENT_ENDED
from .snapshot import AgentState, Policy

# So long a pod that is to train waits for a place before a spare gives its own away.
SPARE_PATIENCE = timedelta(seconds=60)
# What runs beside an agent that has ended (a sidecar, a shell) may ignore its end: it has nothing to save for which it would get
# the time of a drain.
LEFTOVER_GRACE_S = 30


def rank_order(candidates: list[Replica], record: Record, policy: Policy) -> list[Replica]:
    """Order replicas by group rank: base spec before elastic, survivors in their old order, newcomers last."""
    spec_at = {spec.name: at for at, spec in enumerate(policy.specs)}
    old = {member: at for at, member in enumerate(record.members)}
    last = len(old)

    def key(replica: Replica) -> tuple[int, int, PodId]:
        return spec_at.get(replica.id.spec, len(spec_at)), old.get(replica.id, last), replica.id

    return sorted(candidates, key=key)


def usable(candidates: list[Replica], record: Record, policy: Policy) -> list[Replica]:
    """Give those who may train, in the order of their group ranks: of each spec no more than its limit, the rest are spares.

    Without the minimum of the base spec only its own pods count, which are too few then.
    """
    left = {spec.name: spec.limit for spec in policy.specs}
    chosen: list[Replica] = []
    for replica in rank_order(candidates, record, policy):
        if left.get(replica.id.spec, 0) > 0:
            left[replica.id.spec] -= 1
            chosen.append(replica)
    if lacks_base((r.id for r in chosen), policy):
        return [r for r in chosen if r.id.spec == policy.specs[0].name]
    return chosen


def room_for(pods: Collection[PodId], policy: Policy) -> int:
    """Count the pods that may train together: 0 without the minimum of the base spec."""
    return 0 if lacks_base(pods, policy) else capped(pods, policy)


def capped(pods: Collection[PodId], policy: Policy) -> int:
    """Count pods, of each spec no more than its limit, and no more than the largest size."""
    number = Counter(pod.spec for pod in pods)
    return min(policy.sizes.maximum, sum(min(spec.limit, number[spec.name]) for spec in policy.specs))


def wanted_slots(policy: Policy, record: Record, replicas: Replicas) -> list[Slot]:
    """Give the slots that should hold a pod: as many as the largest allowed size, and the spares of each spec in use.

    Within a spec, slots of members stay, then those of living pods, then the lowest ordinals; the base spec fills first.
    In a queue only slots with quota count.
    """
    members = {member.slot for member in record.members}
    left = policy.sizes.maximum
    wanted: list[Slot] = []
    for spec in policy.specs:
        room = min(left, spec.limit)
        known = {slot for slot in (*replicas.newest, *members) if slot.spec == spec.name}
        slots = known | {Slot(spec.name, ordinal) for ordinal in range(room + spec.spares)}
        if policy.granted is not None:
            slots = {slot for slot in policy.granted if slot.spec == spec.name}

        def key(slot: Slot) -> tuple[bool, int, int]:
            return slot not in members, _distance(replicas.newest.get(slot)), slot.ordinal

        wanted += sorted(slots, key=key)[: room + spec.spares if room else 0]
        left -= room
    return wanted


def _distance(replica: Replica | None) -> int:
    """How far a slot is from training: 0 its pod runs, 1 it is on its way, 2 there is none that could."""
    if replica is None or not replica.may_train:
        return 2
    return 1 if replica.health is Health.PENDING and not replica.pod.started else 0


def record_incarnations(record: Record, pods: Iterable[PodId]) -> Record:
    """Note the incarnations of pods that were seen: a name that a pod bore is not used again, whatever became of it."""
    newest = dict(record.incarnations)
    for pod in (*record.members, *pods):
        newest[pod.slot] = max(pod.incarnation, newest.get(pod.slot, 0))
    return record if newest == record.incarnations else replace(record, incarnations=newest)


def newest_incarnations(record: Record, replicas: Replicas) -> dict[Slot, int]:
    """Give the newest incarnation that a pod of each slot ever had, as far as anything tells."""
    newest = dict(record.incarnations)
    for pod in (*record.members, *record.lost, *replicas.by_id):
        slot = pod.slot
        newest[slot] = max(pod.incarnation, newest.get(slot, -1))
    return newest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What keeps pods from being asked for. avoids: nodes that new ones keep away from. refused_until: the API server
    refused the last one. growth_until: pods beyond the present size are not worth asking for before.
    """

    avoids: tuple[str, ...] = ()
    refused_until: datetime | None = None
    growth_until: datetime | None = None


def supply_pods(
    policy: Policy, record: Record, replicas: Replicas, now: datetime, wanted: list[Slot], limits: Limits
) -> tuple[list[Action], datetime | None]:
    """Create the pods that are missing of the wanted slots and remove those that are not wanted any more.

    Gives the actions, and when the next creation falls due (back-off after pods that ended by themselves, or were refused).
    A creation that came to nothing is tried again under the same name. On quota of a queue a replacement waits until the pod
    before it is gone: both together would be more than was granted.
    """
    actions: list[Action] = []
    wakes: list[datetime] = []
    nnodes = len(record.members) or policy.sizes.start
    in_use = {member.slot for member in record.members} if record.transition is None else set(wanted)
    misplaced = _outdated_placement(replicas, limits.avoids)
    taken = _still_on_quota(replicas, misplaced) if policy.granted is not None else {}
    newest = newest_incarnations(record, replicas)
    spares = spare_slots(policy, wanted)
    all_placed = all(is_placed(replicas.newest.get(slot)) for slot in wanted if slot not in spares)
    for slot in wanted:
        replica = replicas.newest.get(slot)
        if replica is not None and replica.may_train and slot not in misplaced:
            continue
        if slot in spares and not all_placed:
            continue  # a spare must not take the place of one that is to train
        if slot in taken:
            if slot in misplaced:
                actions += remove(taken[slot], "waits for a place with an outdated idea of the nodes to avoid")
            continue
        due = latest(
            _creation_due(replica, record, policy) if slot not in misplaced else None,
            limits.refused_until,
            limits.growth_until if slot not in in_use else None,
        )
        if due is not None and due > now:
            wakes.append(due)
            continue
        pod = PodId(slot.spec, slot.ordinal, newest.get(slot, -1) + 1)
        workload = policy.granted.get(slot, "") if policy.granted is not None else ""
        actions.append(CreatePod(pod, nnodes, record.generation, limits.avoids, workload))
    if (due := _spares_leave_at(policy, record, replicas, wanted, spares)) is not None:
        if due > now:
            wakes.append(due)
        else:
            wanted = [slot for slot in wanted if slot not in spares]
    return actions + _removals(set(wanted), record, replicas), earliest(*wakes)


def _spares_leave_at(
    policy: Policy, record: Record, replicas: Replicas, wanted: list[Slot], spares: set[Slot]
) -> datetime | None:
    """Give when spares leave their places to pods that are to train; None while these have theirs, or it would not help.

    They came when there was room for all; that some of it went shows in pods that wait for a place for long.
    """
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
    now_fits = policy.sizes.fit(room_for({*members, *placed}, policy))
    if policy.sizes.fit(room_for({*members, *placed, *freed}, policy)) <= now_fits:
        return None
    return min(r.pod.created_at for r in waiting) + SPARE_PATIENCE


def is_placed(replica: Replica | None) -> bool:
    """Whether there is a pod that lives and has a node."""
    return replica is not None and replica.may_train and bool(replica.pod.node)


def spare_slots(policy: Policy, wanted: list[Slot]) -> set[Slot]:
    """Give the slots beyond those that may train: of each spec the last ones, in the order in which slots are wanted."""
    left = policy.sizes.maximum
    spares: set[Slot] = set()
    for spec in policy.specs:
        room = min(left, spec.limit)
        spares.update([slot for slot in wanted if slot.spec == spec.name][room:])
        left -= room
    return spares


def _outdated_placement(replicas: Replicas, avoids: tuple[str, ...]) -> set[Slot]:
    """Give the slots whose pods wait for a place with an outdated idea of the nodes to avoid."""
    return {
        slot
        for slot, r in replicas.newest.items()
        if r.health is Health.PENDING and not r.pod.node and r.pod.kill_at is None and r.pod.avoids != avoids
    }


def _still_on_quota(replicas: Replicas, misplaced: set[Slot]) -> dict[Slot, Replica]:
    """Give the slots whose pods still take of their quota although others are to come in their places.

    Who is lost does while its kubelet lives, which is about to end it; a dead node never blocks a replacement (decision 7).
    """
    return {
        r.id.slot: r
        for r in replicas.by_id.values()
        if not r.gone
        and (r.health is Health.DISRUPTED or r.may_still_run or (r.id.slot in misplaced and r.health is Health.PENDING))
    }


def latest(*times: datetime | None) -> datetime | None:
    """Give the time from which nothing stands in the way any more; None when nothing does."""
    return max((t for t in times if t is not None), default=None)


def _creation_due(replica: Replica | None, record: Record, policy: Policy) -> datetime | None:
    """When a pod may be made anew: at once the first time, later with exponential back-off from the last creation on.

    It keeps containers that end at once, or replacements that land on the same doomed node, from turning in circles.
    Pods that somebody deleted are replaced at once.
    """
    if replica is None or replica.pod.kill_at is not None:
        return None
    tries: int = max(replica.id.incarnation, record.consecutive_failures)
    if tries == 0:
        return None
    return replica.pod.created_at + doubled(policy.backoff_base, policy.backoff_max, tries)


def _removals(wanted: set[Slot], record: Record, replicas: Replicas) -> list[Action]:
    held = _kept_members(record, replicas)
    last_words = _kept_for_logs(replicas)
    actions: list[Action] = []
    for replica in replicas.by_id.values():
        if replica.id in held or replica.id in last_words:
            continue
        if replica.id != replicas.newest[replica.id.slot].id:
            why = "replaced by a newer pod"
        elif replica.id.slot not in wanted:
            why = "no longer wanted at this size"
        elif replica.health is Health.DISRUPTED:
            why = replica.detail
        elif replica.health is Health.LOST:
            why = "lost"
        elif holds_resources(replica):
            why = "its agent's container has ended; the other containers would keep its place"
        else:
            continue
        actions += remove(replica, why)
    return actions


def _kept_members(record: Record, replicas: Replicas) -> set[PodId]:
    """Give the members that still train or park. Once all are parked, only what the next generation may take is kept."""
    members = [r for m in record.members if (r := replicas.get(m)) is not None and r.health is not Health.LOST]
    if record.transition is not None and all(r.is_idle or r.has_no_workers for r in members):
        return set()
    return {r.id for r in members}


def _kept_for_logs(replicas: Replicas) -> set[PodId]:
    """Give the newest ended pod of each slot whose replacement does not work yet: its log says why."""
    kept: dict[Slot, PodId] = {}
    for replica in replicas.by_id.values():
        slot = replica.id.slot
        if replica.health is not Health.ENDED or holds_resources(replica):
            continue
        if replicas.newest[slot].health is not Health.GOOD:
            kept[slot] = max(kept.get(slot, replica.id), replica.id)
    return set(kept.values())


def holds_resources(replica: Replica) -> bool:
    """Whether an ended agent's pod still holds its devices and its quota, because other containers of it run."""
    return replica.health is Health.ENDED and not (replica.pod.ended or replica.pod.containers_ended)


def remove(replica: Replica, why: str) -> list[Action]:
    """End a pod's agent if it answers and delete the pod; force where its kubelet will not do it (decision 6)."""
    actions: list[Action] = []
    if replica.health in (Health.GOOD, Health.DISRUPTED) and replica.agent.state not in (None, AgentState.SHUTDOWN):
        actions.append(ShutDownAgent(replica.pod.name))
    # Once more where a deletion is under way already but no kubelet will complete it.
    force = replica.kubelet_gone if replica.pod.ended else replica.gone
    if replica.pod.kill_at is None or force:
        is_over = not force and (holds_resources(replica) or replica.why == AGENT_ENDED)
        actions.append(DeletePod(replica.pod.name, replica.pod.uid, why, force, LEFTOVER_GRACE_S if is_over else None))
    return actions


def earliest(*times: datetime | None) -> datetime | None:
    """Give the earliest of the times that are set."""
    return min((t for t in times if t is not None), default=None)
