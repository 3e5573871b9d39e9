"""Requests to Kueue: create the Workloads of increments, delete those that are not used any more (docs/design/queues.md).

Increments are requested early and wait in the queue. Quota is returned only after the pods are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from .actions import (
    Action,
    CreateWorkload,
    DeleteWorkload,
    FinishWorkload,
    JobEvent,
    ReleaseBaseQuota,
    SetFinalizer,
    SetPodsReady,
    SetQueueLabel,
    UpdateWorkloadPriority,
)
from .backoff import backoff
from .context import PlanDraft
from .ending import deletion_due_at
from .growth_mode import GrowthMode
from .names import Slot
from .payback import growth_hold
from .pod_removal import remove
from .quota import (
    Quota,
    QuotaRequest,
    effective_quota_requests,
    filled,
    fits,
    pods_by_workload,
    replacements_awaited_until,
)
from .reasons import Reason
from .record import Record, RequeueBackoff
from .replica import Health, Replica, Replicas
from .requested_pods import READ_EVERY, places_left
from .slots import is_placed
from .snapshot import ObservedWorkload, Policy, Snapshot
from .time_order import earliest, latest
from .wording import counted

# Increments of one job that wait in the queue at a time: a job of thousands must not flood Kueue.
MAX_WAITING = 16
# After this time without a lost increment, the back-off starts from the beginning.
BACKOFF_MEMORY = timedelta(minutes=30)
# How long a deleted job is kept after the deadline of its pods, if quota cannot be returned.
QUOTA_RETURN_PATIENCE = timedelta(seconds=60)


def with_quota_requests(draft: PlanDraft, snapshot: Snapshot, replicas: Replicas, quota: Quota | None) -> PlanDraft:
    """Add the calls to Kueue: create, delete, finish and mark Workloads."""
    record = draft.record
    is_new = snapshot.job.record is None or not snapshot.job.was_reconciled
    if record.queue and record.queue != snapshot.job.queue and is_new:
        draft = draft.with_actions(SetQueueLabel(record.queue))
    if snapshot.job.policy is None:
        return draft.with_actions(*_with_unusable_spec(record, snapshot, replicas))
    if quota is None:
        return draft
    if record.outcome:
        return draft.with_actions(*_finish(record, replicas, quota))
    policy = snapshot.job.policy
    record, drops, events = _deletions(record, snapshot, replicas, quota, policy)
    asks, wake = _creations(record, snapshot, replicas, quota, policy)
    marks = _readiness(replicas, quota, policy)
    increments = (quota.requests[number] for number in quota.granted if number)
    wake = earliest(draft.wake_at, wake, *replacements_awaited_until(snapshot, record, increments).values())
    draft = replace(draft, record=record, events=(*draft.events, *events), wake_at=wake)
    return draft.with_actions(*drops, *_priority_updates(quota), *asks, *marks)


def _with_unusable_spec(record: Record, snapshot: Snapshot, replicas: Replicas) -> list[Action]:
    """Return evicted quota of a job with an invalid spec, so that other jobs do not wait for it.

    Its agents cannot be called without the spec, so the kubelet ends the pods, as in any eviction.
    """
    if record.outcome:
        return _finish(record, replicas, Quota("", (), {w.number: w for w in snapshot.workloads}, {}, {}))
    actions: list[Action] = []
    evicted = [w for w in snapshot.workloads if w.eviction_reason and not w.is_deleting]
    using = pods_by_workload(replicas, evicted, ())
    for workload in evicted:
        pods = using[workload.name]
        for replica in pods:
            actions += remove(replica, f"Kueue evicts the job: {workload.eviction_message}")
        if not pods:
            actions.append(
                DeleteWorkload(workload.name, workload.uid, workload.eviction_message or workload.eviction_reason)
            )
    return actions


def with_quota_returns(draft: PlanDraft, snapshot: Snapshot, replicas: Replicas) -> PlanDraft:
    """Return the quota of a job that is being deleted, and keep the job until that is done.

    Pending Workloads are deleted at once, so that Kueue cannot admit them; the others follow their pods. Finished ones hold no quota
    and are left to the garbage collector. So are those that cannot be returned in time, once no pod is left.
    """
    left = [w for w in snapshot.workloads if not (w.finished or w.is_deleting)]
    if not (left or snapshot.quota_return_error):
        return draft
    base = next((w for w in snapshot.workloads if w.number == 0), None)
    requests = effective_quota_requests(snapshot.job.policy, base) if snapshot.job.policy is not None else ()
    using = pods_by_workload(replicas, left, requests)
    drops = [
        DeleteWorkload(w.name, w.uid, "the job is deleted")
        for w in sorted(left, key=lambda w: (w.number == 0, w.number))
        if not (w.reserved and using[w.name])
    ]
    if draft.actions != (SetFinalizer(False),):
        return draft.with_actions(*drops)
    given_up_at = quota_returned_until(snapshot)
    if snapshot.quota_return_error and snapshot.now >= given_up_at:
        return draft
    return replace(draft, actions=tuple(drops), wake_at=given_up_at if snapshot.quota_return_error else None)


def quota_returned_until(snapshot: Snapshot) -> datetime:
    """Give until when a deleted job is kept if its quota cannot be returned."""
    return deletion_due_at(snapshot) + QUOTA_RETURN_PATIENCE


def backoff_until(record: Record, now: datetime) -> datetime | None:
    """Give until when a partial gang leaves its nodes to others; None when it does not."""
    until = record.gang.released_until if record.gang is not None else None
    return until if until is not None and now < until else None


def slots_backing_off(record: Record, quota: Quota, now: datetime) -> frozenset[Slot]:
    """Give the slots that get no pods while a partial gang backs off: those of Workloads on which no replica trains."""
    if backoff_until(record, now) is None:
        return frozenset()
    return frozenset(slot for request in quota.requests if not _is_in_use(request, record) for slot in request.slots)


def increments_requested_from(record: Record, policy: Policy, now: datetime) -> datetime | None:
    """Give when increments are requested again (after faults, lost quota and failed attempts); None: now."""
    snooze = record.recovered_at + policy.snooze if record.recovered_at is not None else None
    requeue_at = record.requeue_backoff.until if record.requeue_backoff is not None else None
    until = latest(backoff_until(record, now), snooze, requeue_at, growth_hold(record, policy))
    return until if until is not None and until > now else None


def _finish(record: Record, replicas: Replicas, quota: Quota) -> list[Action]:
    """Finish the Workloads. A pending increment is deleted at once, because Kueue could admit it meanwhile."""
    succeeded = record.outcome == "Completed"
    actions: list[Action] = []
    left = {n: w for n, w in quota.present.items() if not (w.finished or w.is_deleting)}
    using = pods_by_workload(replicas, left.values(), quota.requests)
    for number, workload in left.items():
        if number and not workload.reserved:
            actions.append(DeleteWorkload(workload.name, workload.uid, "the job has ended"))
        elif not using[workload.name]:
            actions.append(FinishWorkload(workload.name, workload.uid, succeeded, record.outcome_message))
    return actions


def _deletions(
    record: Record, snapshot: Snapshot, replicas: Replicas, quota: Quota, policy: Policy
) -> tuple[Record, list[Action], list[JobEvent]]:
    """Delete unwanted Workloads when their pods are gone. Evicted increments are not requested again at once."""
    actions: list[Action] = []
    events: list[JobEvent] = []
    shed = [
        w
        for n, w in sorted(quota.present.items())
        if n and (w.eviction_reason or n in quota.useless) and not w.is_deleting
    ]
    # Increments go before their base is returned: Kueue may place the base elsewhere, and they are pinned to its old nodes.
    ordered = sorted(quota.present.items(), key=lambda item: (item[0] == 0, item[0]))
    reasons = ((n, w, _why_unwanted(n, w, record, snapshot, quota, policy)) for n, w in ordered)
    unwanted = [(n, w, why) for n, w, why in reasons if why and not w.is_deleting]
    using = pods_by_workload(replicas, [w for _, w, _ in unwanted], quota.requests)
    for number, workload, why in unwanted:
        is_empty = not (workload.reserved and using[workload.name])
        if number in quota.useless or (number and workload.eviction_reason and is_empty):
            record, event = _back_off(record, shed, policy, snapshot)
            events += [event] if event is not None else []
        if not is_empty:
            continue
        if number == 0 and workload.eviction_reason:
            if not _increments_left(quota):
                actions.append(ReleaseBaseQuota(workload.name, workload.uid))
        else:
            actions.append(DeleteWorkload(workload.name, workload.uid, why))
    return record, actions, events


def _why_unwanted(
    number: int, workload: ObservedWorkload, record: Record, snapshot: Snapshot, quota: Quota, policy: Policy
) -> str:
    """Give why a Workload must be deleted; empty if it stays."""
    if workload.eviction_reason:
        return workload.eviction_message or workload.eviction_reason
    if not quota.queue:
        return "the job is no longer in a queue"
    if policy.suspend:
        return "the user suspended the job"
    if number >= len(quota.requests):
        return "the job may no longer grow to this size"
    if not fits(workload, quota.requests[number]):
        return "the sizes or templates of the job were edited"
    if not workload.reserved and workload.queue != quota.queue:
        return f"the job is now in queue {quota.queue}"
    if number == 0:
        return ""
    if 0 not in quota.granted:
        return "the base of the job has no quota"
    if number in quota.useless:
        return quota.useless[number]
    if backoff_until(record, snapshot.now) is not None and not _is_in_use(quota.requests[number], record):
        return "there was room for a part of it"
    return "it was marked as finished by another client" if workload.finished else ""


def _is_in_use(request: QuotaRequest, record: Record) -> bool:
    return record.transition is None and not record.member_slots.isdisjoint(request.slots)


def _increments_left(quota: Quota) -> list[ObservedWorkload]:
    """Give the increments that hold quota or may be granted it."""
    return [w for number, w in quota.present.items() if number and not (w.is_deleting or w.finished)]


def _back_off(
    record: Record, workloads: Sequence[ObservedWorkload], policy: Policy, snapshot: Snapshot
) -> tuple[Record, JobEvent | None]:
    """Begin the requeue back-off for lost increments, with one Event for all of them."""
    last = record.requeue_backoff
    if last is not None and snapshot.now < last.until:
        return record, None
    tries = last.tries + 1 if last is not None and snapshot.now - last.until < BACKOFF_MEMORY else 1
    until = snapshot.now + backoff(policy.backoff_base, policy.backoff_max, tries, snapshot.job.uid)
    pods = counted(sum(count for w in workloads for _, count in w.counts), "replica")
    names = ", ".join(str(w.number) for w in workloads)
    what = f"{'increments' if len(workloads) > 1 else 'increment'} {names}"
    queues = ", ".join(dict.fromkeys(w.queue for w in workloads))
    event = JobEvent(Reason.QUOTA_GIVEN_BACK, f"the quota of {pods} ({what}) is returned to queue {queues}")
    return replace(record, requeue_backoff=RequeueBackoff(tries, until)), event


def _priority_updates(quota: Quota) -> list[Action]:
    """Update priorities to the job's class, as far as Kueue allows it."""
    ranked = (w for w in quota.present.values() if w.has_outdated_priority and not w.is_priority_fixed)
    return [UpdateWorkloadPriority(w.name, w.uid) for w in ranked if quota.queue and not (w.finished or w.is_deleting)]


def _creations(
    record: Record, snapshot: Snapshot, replicas: Replicas, quota: Quota, policy: Policy
) -> tuple[list[Action], datetime | None]:
    if not quota.queue or policy.suspend:
        return [], None
    if 0 not in quota.present:
        # Kueue may place a new base elsewhere, so nothing of the job may remain on the old nodes.
        is_clear = all(r.cannot_run_again for r in replicas.by_id.values()) and not _increments_left(quota)
        return ([CreateWorkload(0, quota.requests[0].counts, quota.queue)] if is_clear else []), None
    if 0 not in quota.granted:
        return [], None
    missing = [request for request in quota.requests[1:] if request.number not in quota.present]
    until = increments_requested_from(record, policy, snapshot.now)
    if until is not None:
        return [], until if missing else None
    if _is_uneven(quota) and len(quota.granted) < len(quota.present):
        return [], None  # with uneven increments, a larger one is useless without the smaller ones
    waiting = sum(not w.admitted for w in quota.present.values())
    room = 1 if _is_uneven(quota) else max(0, MAX_WAITING - waiting)
    base = quota.granted[0]
    if policy.growth is GrowthMode.SPARE_CAPACITY_ONLY:
        missing, until = _that_fit(missing, snapshot, replicas, waiting)
    return [CreateWorkload(request.number, request.counts, base.queue) for request in missing[:room]], until


def _that_fit(
    missing: list[QuotaRequest], snapshot: Snapshot, replicas: Replicas, waiting: int
) -> tuple[list[QuotaRequest], datetime | None]:
    """Give the increments for which nodes have room now, none while another one waits; and when to look again."""
    capacity = snapshot.spare_capacity
    left = 0 if waiting else places_left(capacity, {r.pod.name for r in replicas.newest.values() if is_placed(r)})
    fitting: list[QuotaRequest] = []
    for request in missing:
        left -= sum(request.trains.values())
        if left < 0:
            break
        fitting.append(request)
    return fitting, capacity.read_at + READ_EVERY if capacity is not None and missing else None


def _is_uneven(quota: Quota) -> bool:
    """Whether the increments differ in size, so that not every set of them makes an allowed size."""
    return len({sum(request.trains.values()) for request in quota.requests[1:]}) > 1


def _readiness(replicas: Replicas, quota: Quota, policy: Policy) -> list[Action]:
    """Report to Kueue which granted Workloads have all their pods ready. Spares are not awaited and can replace other pods.

    Ready pods count for the base first. If there are too few, Kueue may evict an increment, whose pods occupy the nodes for which
    the base waits; an evicted base would stop the whole job.
    """
    actions: list[Action] = []
    slots = (slot for number in quota.granted for slot in quota.requests[number].slots)
    ready = Counter(s.spec for s in slots if (r := replicas.newest.get(s)) is not None and _is_ready(r))
    for number, workload in sorted(quota.granted.items()):
        trains = Counter(quota.requests[number].trains)
        if quota.retained_base and not number:  # the job may be smaller than its base now
            trains = Counter(filled(policy.specs, policy.sizes.fit(quota.retained_base)))
        is_ready = trains <= ready
        ready -= trains
        if is_ready != bool(workload.pods_ready):
            actions.append(SetPodsReady(workload.name, workload.uid, is_ready, workload.pods_ready is not None))
    return actions


def _is_ready(replica: Replica) -> bool:
    return replica.health in (Health.GOOD, Health.SILENT) or replica.pod.phase == "Succeeded"
