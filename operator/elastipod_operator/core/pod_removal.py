"""Which pods are deleted, and how."""

from __future__ import annotations

from datetime import datetime, timedelta

from .actions import Action, DeletePod, ShutDownAgent
from .first_step import has_made_step
from .leavers import kept_until_the_start
from .names import PodId, Slot
from .next_generation import has_begun_next
from .record import Record
from .replica import Health, Replica, Replicas
from .silence import AGENT_ENDED
from .snapshot import AgentState, Policy
from .time_order import earliest

# What runs beside an agent that has ended (a sidecar, a shell) may ignore its end: it has nothing to save for which it would get
# the time of a drain.
LEFTOVER_GRACE_S = 30
# How long healthy pods stay at most after a change that they left. Their removal takes processors, disks and API calls, which those
# who go on need for their first step.
LEAVERS_STAY = timedelta(seconds=2)


def remove_unwanted(
    wanted: set[Slot], record: Record, replicas: Replicas, policy: Policy, now: datetime
) -> tuple[list[Action], datetime | None]:
    """Delete the pods that are not wanted; gives when those go that stay for a moment."""
    held = _kept_members(record, replicas)
    may_come_back = kept_until_the_start(record, replicas, policy)
    last_words = _kept_for_logs(replicas)
    stays_until = _leavers_stay_until(record, replicas, now)
    actions: list[Action] = []
    wake: datetime | None = None
    for replica in replicas.by_id.values():
        if replica.id in held or replica.id in last_words:
            continue
        if replica.id != replicas.newest[replica.id.slot].id:
            reason = "replaced by a newer pod"
        elif replica.id.slot not in wanted:
            reason = "no longer wanted at this size"
        elif replica.health is Health.DISRUPTED:
            reason = replica.detail
        elif replica.health is Health.LOST:
            reason = "lost"
        elif holds_resources(replica):
            reason = "its agent's container has ended; the other containers would keep its place"
        else:
            continue
        if stays_until is not None and replica.health in (Health.GOOD, Health.DISRUPTED) and replica.is_idle:
            wake = stays_until
            continue
        if (until := may_come_back.get(replica.id, now)) > now:
            wake = earliest(wake, until)
            continue
        actions += remove(replica, reason)
    return actions, wake


def _leavers_stay_until(record: Record, replicas: Replicas, now: datetime) -> datetime | None:
    """Give until when the pods that left this generation stay: until its first step, but not for long; None if they go now."""
    if record.transition is not None or record.generation_began_at is None or record.generation < 2:
        return None
    if record.running_since is not None:  # from now on idle pods may be told to prepare
        return None
    until = record.generation_began_at + LEAVERS_STAY
    return until if now < until and not has_made_step(record, replicas) else None


def _kept_members(record: Record, replicas: Replicas) -> set[PodId]:
    """Give the members that still train or park. Once all are parked, only what the next generation may take is kept.

    Those who have begun it by themselves train as members do.
    """
    begun = {r.id for r in replicas.by_id.values() if r.health is not Health.LOST and has_begun_next(r, record)}
    members = [r for m in record.members if (r := replicas.get(m)) is not None and r.health is not Health.LOST]
    if record.transition is not None and all(r.is_idle or r.has_no_workers for r in members):
        return begun
    return begun.union(r.id for r in members)


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


def remove(replica: Replica, reason: str) -> list[Action]:
    """End a pod's agent if it answers and delete the pod; force where its kubelet will not do it."""
    actions: list[Action] = []
    if replica.health in (Health.GOOD, Health.DISRUPTED) and replica.agent.state not in (None, AgentState.SHUTDOWN):
        actions.append(ShutDownAgent(replica.pod.name))
    # Once more where a deletion is under way already but no kubelet will complete it.
    force = replica.is_kubelet_lost if replica.pod.ended else replica.cannot_run_again
    if replica.pod.kill_at is None or force:
        is_over = not force and (holds_resources(replica) or replica.cause == AGENT_ENDED)
        actions.append(
            DeletePod(replica.pod.name, replica.pod.uid, reason, force, LEFTOVER_GRACE_S if is_over else None)
        )
    return actions
