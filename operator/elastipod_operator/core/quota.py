"""What Kueue grants a job, as sizes, slots and suspension (docs/design/queues.md).

A job with a queue requests quota for its minimum size (the base Workload) and for each increment to the next size (one Workload
each). Every Workload stands for fixed slots. Without the base the job is suspended. Granted Workloads limit its sizes and slots.
Pods in slots whose quota is lost are disrupted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from .caches import limited_cache
from .grant import Grant, SuspendedBy, grant_all
from .names import Slot
from .reasons import Reason, ReasonAndMessage
from .record import Record, TransitionKind
from .replica import Replica, Replicas
from .sizes import Allowed
from .snapshot import ObservedPod, ObservedWorkload, Policy, Snapshot, SpecLimits
from .wording import counted

DEFAULT_QUEUE = "default"
# Pods whose quota requests are cached, over all jobs: about 150 bytes each.
MAX_CACHED_SLOTS = 250_000
# Time for replacements of lost pods to be scheduled before the quota of their increment is returned.
REPLACEMENT_PATIENCE = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class QuotaRequest:
    """What one Workload requests: number 0 is the base, others are increments.

    trains: pods by spec that may train. counts: the same with spares.
    """

    number: int
    trains: Mapping[str, int]
    counts: tuple[tuple[str, int], ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Quota:
    """The job's quota requests, its Workloads, and the granted ones among them, by number.

    queue: empty when the job has left its queue and only returns quota.
    """

    queue: str
    requests: tuple[QuotaRequest, ...]
    present: Mapping[int, ObservedWorkload]
    granted: Mapping[int, ObservedWorkload]
    useless: Mapping[int, str]
    """Granted increments that the job returns nevertheless, with the reason."""
    retained_base: int = 0
    """The size that the base was granted for, if the minimum size has been lowered since; else 0."""


def quota_requests_of(policy: Policy) -> tuple[QuotaRequest, ...]:
    """Give what the job requests, the base first; the slots of a spec are consecutive from request to request.

    The spares of a spec belong to the first request that uses it.
    """
    return quota_requests_for(policy.sizes.allowed, policy.specs)


def effective_quota_requests(policy: Policy, base: ObservedWorkload | None) -> tuple[QuotaRequest, ...]:
    """Give the quota requests of a job with this base, which stays as it is while its pods cover the minimum size.

    A Workload cannot be changed, and returning the base would stop a job of which only the sizes or spares were edited.
    """
    kept = _as_granted(policy, base)
    if kept is None:
        return quota_requests_of(policy)
    allowed = policy.sizes.allowed
    if kept.size in allowed:
        return quota_requests_for(allowed[allowed.index(kept.size) :], kept.specs)
    return quota_requests_for((kept.size, *allowed[bisect_right(allowed, kept.size) :]), kept.specs)


def retained_base(policy: Policy, base: ObservedWorkload | None) -> int:
    """Give the size of a granted base that is larger than the minimum size is now; else 0."""
    kept = _as_granted(policy, base)
    return kept.size if kept is not None and kept.size > policy.sizes.minimum else 0


@dataclass(frozen=True, slots=True)
class _GrantedBase:
    """The size that a granted base stands for, and the specs with the spares for which it has room."""

    size: int
    specs: tuple[SpecLimits, ...]


def _as_granted(policy: Policy, base: ObservedWorkload | None) -> _GrantedBase | None:
    """Say what a granted base stands for; None if its pods do not cover the minimum size. Spares are what is left beyond it."""
    if base is None or not base.is_granted:
        return None
    pods = dict(base.counts)
    needed = filled(policy.specs, policy.sizes.minimum)
    if any(pods.get(name, 0) < number for name, number in needed.items()):
        return None
    specs = tuple(
        replace(spec, spares=_spares_within(pods[spec.name], needed[spec.name], spec)) if spec.name in pods else spec
        for spec in policy.specs
    )
    size = sum(pods.values()) - sum(spec.spares for spec in specs if spec.name in pods)
    return _GrantedBase(size, specs) if fits(base, quota_requests_for((size,), specs)[0]) else None


def _spares_within(pods: int, needed: int, spec: SpecLimits) -> int:
    """Give how many of a base's pods of a spec train never: those beyond its limit, and its spares as far as there is room."""
    return max(pods - spec.limit, min(spec.spares, pods - max(1, needed)), 0)


def _pods_in(requests: tuple[QuotaRequest, ...], *_: object) -> int:
    """Weigh a request by its slots."""
    return sum(4 + len(request.slots) for request in requests)


# Cached, because every pass needs them and they depend on the spec alone.
@limited_cache(MAX_CACHED_SLOTS, _pods_in)
def quota_requests_for(allowed: Allowed, specs: tuple[SpecLimits, ...]) -> tuple[QuotaRequest, ...]:
    """Give the quota requests for these sizes, ascending, and specs with these limits."""
    before: dict[str, int] = {}
    taken: dict[str, int] = {}
    found: list[QuotaRequest] = []
    for number, size in enumerate(allowed):
        filled_up = filled(specs, size)
        trains = {
            name: number - before.get(name, 0) for name, number in filled_up.items() if number > before.get(name, 0)
        }
        counts: list[tuple[str, int]] = []
        slots: list[Slot] = []
        for spec in specs:
            if spec.name not in trains:
                continue
            pods = trains[spec.name] + (0 if before.get(spec.name) else spec.spares)
            first = taken.get(spec.name, 0)
            taken[spec.name] = first + pods
            counts.append((spec.name, pods))
            slots += (Slot(spec.name, ordinal) for ordinal in range(first, first + pods))
        found.append(QuotaRequest(number, trains, tuple(counts), tuple(slots)))
        before = filled_up
    return tuple(found)


def adopt_queue(record: Record, snapshot: Snapshot) -> Record:
    """Note the queue that the job is in. A changed label takes effect once nothing runs: running pods keep their quota."""
    job = snapshot.job
    wished = job.queue
    if job.record is None or not (job.was_reconciled or snapshot.pods):
        # A user must not be able to move a job out of its queue by editing the record.
        wished = wished or job.queue_in_template or (DEFAULT_QUEUE if snapshot.default_queue else "")
    elif record.members or snapshot.pods or any(w.reserved for w in snapshot.workloads):
        return record
    return record if wished == record.queue else replace(record, queue=wished)


def apply_quota(snapshot: Snapshot, record: Record) -> tuple[Grant | None, Quota | None]:
    """Give what the job may use now, and its Workloads; neither without a valid spec, no Quota without a queue."""
    policy, queue = snapshot.job.policy, record.queue
    if policy is None:
        return None, None
    if not (queue or snapshot.workloads):
        return grant_all(policy), None
    present = {w.number: w for w in snapshot.workloads}
    kept, requests = retained_base(policy, present.get(0)), effective_quota_requests(policy, present.get(0))
    if not queue:
        return grant_all(policy), Quota("", requests, present, {}, {})
    granted = {s.number: w for s in requests if (w := present.get(s.number)) and w.is_granted and fits(w, s)}
    if 0 not in granted or must_request_again(snapshot, record):
        return _suspended(snapshot, policy, present.get(0), requests[0], queue), Quota(queue, requests, present, {}, {})
    useless = _useless(snapshot, record, granted, requests, kept)
    useful = {number: w for number, w in granted.items() if number not in useless}
    quota = Quota(queue, requests, present, useful, useless, kept)
    return _granted(snapshot, policy, quota), quota


def must_request_again(snapshot: Snapshot, record: Record) -> bool:
    """Whether the template was edited while nothing runs: pods of the new template need new quota.

    A job that recovers without any pod left goes on with the quota that it has, and with the template before the edit.
    """
    is_idle = not record.members and all(pod.ended for pod in snapshot.pods)
    recovers = record.transition is not None and record.transition.kind is TransitionKind.RECOVERY
    return bool(snapshot.job.pending_edits) and is_idle and not recovers


def is_on(pod: ObservedPod, workload: ObservedWorkload, requests: Sequence[QuotaRequest]) -> bool:
    """Whether a pod uses a Workload's quota: it was created for it, or is in one of its slots."""
    slots = requests[workload.number].slots if workload.number < len(requests) else ()
    return pod.workload == workload.name or pod.id.slot in slots


def pods_by_workload(
    replicas: Replicas, workloads: Iterable[ObservedWorkload], requests: Sequence[QuotaRequest]
) -> dict[str, list[Replica]]:
    """Give the pods that still use the quota of each of these Workloads, by its name (see `is_on`)."""
    using: dict[str, list[Replica]] = {workload.name: [] for workload in workloads}
    named: dict[int, list[str]] = {}
    for workload in workloads:
        named.setdefault(workload.number, []).append(workload.name)
    stands_for = {
        slot: names for number, names in named.items() if number < len(requests) for slot in requests[number].slots
    }
    for replica in replicas.by_id.values():
        if replica.cannot_run_again:
            continue
        created_for = [replica.pod.workload] if replica.pod.workload in using else []
        for name in dict.fromkeys((*created_for, *stands_for.get(replica.id.slot, ()))):
            using[name].append(replica)
    return using


def fits(workload: ObservedWorkload, request: QuotaRequest) -> bool:
    """Whether a Workload still matches the request; it cannot be changed, only returned."""
    return sorted(workload.counts) == sorted(request.counts) and not workload.is_outdated


def filled(specs: tuple[SpecLimits, ...], size: int) -> dict[str, int]:
    """Give how many replicas of each spec train at a size: the base spec first."""
    found: dict[str, int] = {}
    for spec in specs:
        found[spec.name] = min(size, spec.limit)
        size -= found[spec.name]
    return found


def _useless(
    snapshot: Snapshot,
    record: Record,
    granted: Mapping[int, ObservedWorkload],
    requests: tuple[QuotaRequest, ...],
    kept: int,
) -> dict[int, str]:
    """Find granted increments to return: their pods cannot be scheduled after a fault, or they make no allowed size.

    Returned increments stay returned until the back-off is over. kept: the size of a base that is larger than the minimum is now.
    """
    assert snapshot.job.policy is not None
    allowed = snapshot.job.policy.sizes.allowed
    awaited = replacements_awaited_until(snapshot, record, (requests[number] for number in granted if number))
    found = dict.fromkeys(
        (number for number, until in awaited.items() if until <= snapshot.now),
        "replacements of lost pods cannot be scheduled",
    )
    if record.requeue_backoff is not None and snapshot.now < record.requeue_backoff.until:
        stays = (pod.id.slot for pod in snapshot.pods if pod.kill_at is None and not pod.ended)
        in_use = record.member_slots.union(stays)
        idle = (number for number in granted if number and in_use.isdisjoint(requests[number].slots))
        found.update(dict.fromkeys(idle, "increments were returned a short time ago"))
    left = [number for number in sorted(granted) if number not in found]
    size = sum(sum(requests[number].trains.values()) for number in left)
    while size not in allowed and size != kept:
        number = left.pop()
        size -= sum(requests[number].trains.values())
        found[number] = "it makes no allowed size while smaller increments have no quota"
    return found


def replacements_awaited_until(
    snapshot: Snapshot, record: Record, requests: Iterable[QuotaRequest]
) -> dict[int, datetime]:
    """Give those of these increments without pods whose replacements wait for nodes, by number, and until when they may."""
    if not record.shrank_after_fault or record.transition is not None:
        return {}
    since: dict[Slot, datetime] = {}
    for pod in snapshot.pods:
        if not (pod.node or pod.ended):
            since[pod.id.slot] = min(since.get(pod.id.slot, pod.created_at), pod.created_at)
    found: dict[int, datetime] = {}
    for request in requests:
        waiting = [since[slot] for slot in request.slots if slot in since]
        if waiting and record.member_slots.isdisjoint(request.slots):
            found[request.number] = min(waiting) + REPLACEMENT_PATIENCE
    return found


def _suspended(
    snapshot: Snapshot, policy: Policy, base: ObservedWorkload | None, request: QuotaRequest, queue: str
) -> Grant:
    """Suspend the job until its base has quota. If the user has suspended it, that is the reason."""
    if policy.suspend:
        return grant_all(policy)
    why = _why_suspended(snapshot, base, request, queue)
    return replace(grant_all(policy), is_suspended=True, suspended_by=why)


def _granted(snapshot: Snapshot, policy: Policy, quota: Quota) -> Grant:
    """Grant the slots of the Workloads that have quota."""
    trains: Counter[str] = Counter()
    pods: Counter[str] = Counter()
    slots: dict[Slot, str] = {}
    for number, workload in quota.granted.items():
        request = quota.requests[number]
        trains.update(request.trains)
        pods.update(dict(request.counts))
        slots.update(dict.fromkeys(request.slots, workload.name))
    return Grant(
        sizes=replace(policy.sizes, allowed=policy.sizes.up_to(trains.total())),
        specs=tuple(
            SpecLimits(s.name, trains[s.name], min(s.spares, pods[s.name] - trains[s.name])) for s in policy.specs
        ),
        workloads=slots,
        quota_lost={
            **_lost_quota({slot for pod in snapshot.pods if (slot := pod.id.slot) not in slots}, quota),
            **_on_returned_quota(snapshot, slots, quota),
        },
        is_suspended=policy.suspend,
    )


def _why_suspended(snapshot: Snapshot, base: ObservedWorkload | None, request: QuotaRequest, queue: str) -> SuspendedBy:
    if snapshot.queue_problem is not None and base is None:
        return SuspendedBy(*snapshot.queue_problem)
    if base is None:
        return SuspendedBy(Reason.QUEUED, _why_not_requested(snapshot, request, queue))
    deleted = (
        f"Workload {base.name} is being deleted; quota is requested again when it is gone; if it stays, see its metadata.finalizers"
        if base.is_deleting
        else ""
    )
    if base.eviction_reason:
        evicts = f"Kueue evicts the job: {base.eviction_message}"
        return SuspendedBy(base.eviction_reason, "; ".join(filter(None, (evicts, deleted))))
    if deleted:
        return SuspendedBy(Reason.QUEUED, deleted)
    if base.finished:
        return SuspendedBy(
            Reason.QUOTA_ENDED,
            f"Workload {base.name} was marked as finished by another client; delete it to request quota again",
        )
    if not fits(base, request) or snapshot.job.pending_edits:
        return SuspendedBy(Reason.SPEC_EDITED, "the minimum size or a template was edited; quota is requested again")
    if not base.is_active:
        return SuspendedBy(
            Reason.DEACTIVATED,
            f"Workload {base.name} was deactivated: {base.pending_message or 'spec.active is false'}",
        )
    return SuspendedBy(
        Reason.QUEUED, f"waits in queue {queue}: {base.pending_message or 'Kueue has not considered it yet'}"
    )


def _why_not_requested(snapshot: Snapshot, request: QuotaRequest, queue: str) -> str:
    """Say what a job without a base waits for: Kueue may place a new base elsewhere, so all pods must have ended."""
    left = sorted(pod.name for pod in snapshot.pods if not pod.ended)
    if not left:
        return f"requesting quota for {counted(sum(request.trains.values()), 'replica')} from queue {queue}"
    more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    return f"there is no base Workload; quota is requested when pod {left[0]}{more} has ended"


def _lost_quota(slots: set[Slot], quota: Quota) -> dict[Slot, ReasonAndMessage]:
    """Give the reason why slots have no quota."""
    if not slots:
        return {}
    share_of = {slot: request for request in quota.requests for slot in request.slots}
    return {slot: _why_quota_lost(slot, share_of.get(slot), quota) for slot in slots}


def _on_returned_quota(snapshot: Snapshot, slots: Collection[Slot], quota: Quota) -> dict[Slot, ReasonAndMessage]:
    """Give the granted slots whose pods were created on an increment that must be returned, with the reason.

    After an edit of the sizes another increment may stand for such a slot, but the old one cannot be returned while the pod lives.
    """
    returned = {w.name: w for number, w in quota.present.items() if number and _must_return(w, quota)}
    if not returned:
        return {}
    newest = {pod.id.slot: pod for pod in sorted(snapshot.pods, key=lambda pod: pod.id.incarnation)}
    on = ((slot, returned.get(pod.workload)) for slot, pod in newest.items() if slot in slots and not pod.ended)
    return {slot: _why_lost(workload, quota) for slot, workload in on if workload is not None}


def _must_return(workload: ObservedWorkload, quota: Quota) -> bool:
    """Whether an increment's quota must be returned, which one that waits for its admission has not got yet."""
    return workload.reserved and (
        bool(workload.eviction_reason)
        or workload.finished
        or workload.number in quota.useless
        or not _is_requested(workload, quota)
    )


def _is_requested(workload: ObservedWorkload, quota: Quota) -> bool:
    return workload.number < len(quota.requests) and fits(workload, quota.requests[workload.number])


def _why_quota_lost(slot: Slot, request: QuotaRequest | None, quota: Quota) -> ReasonAndMessage:
    if request is None:
        return Reason.SCALED_BY_USER, f"replica {slot.spec}-{slot.ordinal} is beyond the largest size"
    workload = quota.present.get(request.number)
    if workload is None:
        pods = counted(sum(pods for _, pods in request.counts), "replica")
        return (
            Reason.QUOTA_LOST,
            f"the quota of {pods} was lost: there is no Workload for increment {request.number}",
        )
    return _why_lost(workload, quota)


def _why_lost(workload: ObservedWorkload, quota: Quota) -> ReasonAndMessage:
    pods = counted(sum(pods for _, pods in workload.counts), "replica")
    if workload.eviction_reason:
        return workload.eviction_reason, f"Kueue evicts {pods}: {workload.eviction_message}"
    if workload.number in quota.useless:
        return Reason.QUOTA_RETURNED, quota.useless[workload.number]
    if not _is_requested(workload, quota):
        return (
            Reason.SPEC_EDITED,
            f"the sizes were edited; the quota of {pods} is returned and requested again",
        )
    return (
        Reason.QUOTA_LOST,
        f"the quota of {pods} was lost: {workload.pending_message or 'it is no longer admitted'}",
    )
