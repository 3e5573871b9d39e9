"""Who trains with which group rank, and which pods there should be (decisions 7, 12, 19)."""

from __future__ import annotations

from datetime import datetime

from .actions import Action, CreatePod, DeletePod, ShutDownAgent
from .facts import AgentState, Policy
from .health import Health, Replica, View
from .names import PodId, Slot
from .record import Record


def rank_order(candidates: list[Replica], record: Record, policy: Policy) -> list[Replica]:
    """Order replicas by group rank: base spec before elastic, survivors in their old order, newcomers last."""
    spec_at = {spec.name: at for at, spec in enumerate(policy.specs)}
    old = {member: at for at, member in enumerate(record.members)}
    last = len(old)

    def key(replica: Replica) -> tuple[int, int, PodId]:
        return spec_at.get(replica.id.spec, len(spec_at)), old.get(replica.id, last), replica.id

    return sorted(candidates, key=key)


def wanted_slots(policy: Policy, record: Record, view: View) -> list[Slot]:
    """Give the slots that should hold a pod: as many as the largest allowed size.

    Within a spec, slots of members stay, then those of living pods, then the lowest ordinals; the base spec fills first.
    """
    members = {member.slot for member in record.members}
    left = policy.sizes.maximum
    wanted: list[Slot] = []
    for spec in policy.specs:
        room = min(left, spec.limit)
        known = {slot for slot in (*view.newest, *members) if slot.spec == spec.name}
        slots = known | {Slot(spec.name, ordinal) for ordinal in range(room)}

        def key(slot: Slot) -> tuple[bool, int, int]:
            return slot not in members, _distance(view.newest.get(slot)), slot.ordinal

        wanted += sorted(slots, key=key)[:room]
        left -= room
    return wanted


def _distance(replica: Replica | None) -> int:
    """How far a slot is from training: 0 its pod runs, 1 it is on its way, 2 there is none that could."""
    if replica is None or replica.health in (Health.ENDED, Health.LOST, Health.DOOMED):
        return 2
    return 1 if replica.health is Health.PENDING and not replica.pod.started else 0


def next_incarnation(slot: Slot, record: Record, view: View) -> int:
    """Give an incarnation that no pod of this slot ever had, as far as anything tells."""
    seen = [pod.incarnation for pod in (*record.members, *record.lost, *view.by_id) if pod.slot == slot]
    if slot in record.incarnations:
        seen.append(record.incarnations[slot])
    return max(seen, default=-1) + 1


def supply(
    policy: Policy, record: Record, view: View, now: datetime
) -> tuple[dict[Slot, int], list[Action], datetime | None]:
    """Create the pods that are missing and remove those that are not wanted any more.

    Gives the incarnations to be recorded, the actions, and when the next creation falls due (back-off after pods that
    ended by themselves).
    """
    incarnations: dict[Slot, int] = {}
    actions: list[Action] = []
    wake: datetime | None = None
    wanted = wanted_slots(policy, record, view)
    nnodes = len(record.members) or policy.sizes.start
    for slot in wanted:
        replica = view.newest.get(slot)
        if replica is not None and replica.health not in (Health.ENDED, Health.LOST, Health.DOOMED):
            continue
        due = _creation_due(replica, record, policy)
        if due is not None and due > now:
            wake = due if wake is None else min(wake, due)
            continue
        incarnation = next_incarnation(slot, record, view)
        if incarnation:
            incarnations[slot] = incarnation
        actions.append(CreatePod(PodId(slot.spec, slot.ordinal, incarnation), nnodes))
    return incarnations, actions + _removals(set(wanted), record, view), wake


def _creation_due(replica: Replica | None, record: Record, policy: Policy) -> datetime | None:
    """When a pod may be made anew: at once the first time, later with exponential back-off from the last creation on.

    It keeps containers that end at once, or replacements that land on the same doomed node, from turning in circles.
    Pods that somebody deleted are replaced at once.
    """
    if replica is None or replica.pod.kill_at is not None:
        return None
    tries: int = max(replica.id.incarnation, record.failures_in_row)
    if tries == 0:
        return None
    wait = policy.backoff_base * int(2 ** min(tries - 1, 16))
    return replica.pod.created_at + min(policy.backoff_max, wait)


def _removals(wanted: set[Slot], record: Record, view: View) -> list[Action]:
    held = _held(record, view)
    last_words = _last_words(view)
    actions: list[Action] = []
    for replica in view.by_id.values():
        if replica.id in held or replica.id in last_words:
            continue
        if replica.id != view.newest[replica.id.slot].id:
            why = "replaced by a newer pod"
        elif replica.id.slot not in wanted:
            why = "no longer wanted at this size"
        elif replica.health is Health.DOOMED:
            why = "its node or the pod itself is about to go"
        elif replica.health is Health.LOST:
            why = "lost"
        else:
            continue
        actions += remove(replica, why)
    return actions


def _held(record: Record, view: View) -> set[PodId]:
    """Give the members that still train or park. Once all are parked, only what the next generation may take is kept."""
    members = [r for m in record.members if (r := view.get(m)) is not None and r.health is not Health.LOST]
    if record.transition is not None and all(r.parked or r.health is Health.ENDED for r in members):
        return set()
    return {r.id for r in members}


def _last_words(view: View) -> set[PodId]:
    """Give the newest ended pod of each slot whose replacement does not work yet: its log says why."""
    kept: dict[Slot, PodId] = {}
    for replica in view.by_id.values():
        slot = replica.id.slot
        if replica.health is Health.ENDED and view.newest[slot].health is not Health.GOOD:
            kept[slot] = max(kept.get(slot, replica.id), replica.id)
    return set(kept.values())


def remove(replica: Replica, why: str) -> list[Action]:
    """End a pod's agent if it answers and delete the pod; force where its kubelet will not do it (decision 6)."""
    actions: list[Action] = []
    if replica.health in (Health.GOOD, Health.DOOMED) and replica.agent.state not in (None, AgentState.SHUTDOWN):
        actions.append(ShutDownAgent(replica.pod.name))
    # Once more where a deletion is under way already but a kubelet may never complete it.
    if replica.pod.kill_at is None or replica.gone:
        force = replica.gone and not replica.pod.ended
        actions.append(DeletePod(replica.pod.name, replica.pod.uid, why, force))
    return actions


def soonest(*times: datetime | None) -> datetime | None:
    """Give the earliest of the times that are set."""
    return min((t for t in times if t is not None), default=None)
