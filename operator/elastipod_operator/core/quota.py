"""What Kueue grants a job, in the terms of all other decisions (docs/design/queues.md, spec 40).

A job with a queue asks for its smallest size (the base) and for each way to the next size (an increment). Each of these
shares stands for fixed slots. Without the base the job is held, which is a suspension; what is granted bounds sizes and
slots; pods of slots whose quota is taken back are doomed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from .caches import limited_cache
from .names import Slot
from .record import Record
from .sizes import Allowed
from .snapshot import Held, Observed, PodFact, Policy, SpecShape, WorkloadFact

DEFAULT_QUEUE = "default"
# Pods whose shares are kept, of all jobs together: some 150 bytes each.
SHARES_KEPT = 250_000
# So long pods that were lost to a fault wait for a place before the quota of their increment is given back.
FAULT_PATIENCE = timedelta(seconds=120)


@dataclass(frozen=True, slots=True)
class Share:
    """What one Workload asks for: number 0 is the base. trains: pods by spec that may train; counts: those and the spares."""

    number: int
    trains: Mapping[str, int]
    counts: tuple[tuple[str, int], ...]
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Quota:
    """The shares that the job wishes, its Workloads, and those of them that are granted now, by number.

    queue: empty when the job is in none any more, and what it has is only to be given back.
    """

    queue: str
    shares: tuple[Share, ...]
    present: Mapping[int, WorkloadFact]
    granted: Mapping[int, WorkloadFact]
    useless: Mapping[int, str]
    """Increments that Kueue granted, and why the job gives them back all the same."""
    kept_base: int = 0
    """The size that the base was granted for, where the smallest size is a smaller one by now; 0 where it is not."""


def shares_of(policy: Policy) -> tuple[Share, ...]:
    """Give what the job asks for, the base first; each spec's slots follow each other from share to share.

    The spares of a spec come with the first share that uses it.
    """
    return shares_for(policy.wished_sizes.allowed, policy.wished_specs)


def shares_in_force(policy: Policy, base: WorkloadFact | None) -> tuple[Share, ...]:
    """Give the shares of a job with this base: one that was granted for a larger smallest size stays as it is.

    A Workload cannot be changed, and giving the base back would stop a job of which only the minimum was lowered.
    """
    kept = kept_base(policy, base)
    if not kept:
        return shares_of(policy)
    allowed = policy.wished_sizes.allowed
    if kept in allowed:
        return shares_for(allowed[allowed.index(kept) :], policy.wished_specs)
    return shares_for((kept, *allowed[bisect_right(allowed, kept) :]), policy.wished_specs)


def kept_base(policy: Policy, base: WorkloadFact | None) -> int:
    """Give the size of a granted base that is larger than the smallest size by now; 0 where there is none."""
    if base is None or not base.is_granted:
        return 0
    pods = dict(base.counts)
    size = sum(pods.values()) - sum(spec.spares for spec in policy.wished_specs if spec.name in pods)
    if size <= policy.wished_sizes.minimum or not fits(base, shares_for((size,), policy.wished_specs)[0]):
        return 0
    return size


def _pods_in(shares: tuple[Share, ...], *_: object) -> int:
    """A share weighs as much as a few of its slots."""
    return sum(4 + len(share.slots) for share in shares)


# Every pass over a job asks for them, and jobs have them from their spec alone.
@limited_cache(SHARES_KEPT, _pods_in)
def shares_for(allowed: Allowed, specs: tuple[SpecShape, ...]) -> tuple[Share, ...]:
    """Give the shares of these sizes, ascending, of specs with these limits."""
    before: dict[str, int] = {}
    taken: dict[str, int] = {}
    found: list[Share] = []
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
        found.append(Share(number, trains, tuple(counts), tuple(slots)))
        before = filled_up
    return tuple(found)


def with_queue(record: Record, seen: Observed) -> Record:
    """Note the queue that the job is in. Another label acts once nothing runs: what runs keeps the quota that it has."""
    job = seen.job
    wished = job.queue
    if job.record is None or not (job.was_seen or seen.pods):
        # Nobody writes himself a record with which a job leaves the queue that adopts it.
        wished = wished or job.queue_in_template or (DEFAULT_QUEUE if seen.default_queue else "")
    elif record.members or seen.pods or any(w.reserved for w in seen.workloads):
        return record
    return record if wished == record.queue else replace(record, queue=wished)


def under_quota(seen: Observed, record: Record) -> tuple[Observed, Quota | None]:
    """Give what the other decisions see: wishes bounded by what is granted, and slots whose quota is taken back."""
    policy, queue = seen.job.policy, record.queue
    if policy is None or not (queue or seen.workloads):
        return seen, None
    present = {w.number: w for w in seen.workloads}
    kept, shares = kept_base(policy, present.get(0)), shares_in_force(policy, present.get(0))
    if not queue:
        return seen, Quota("", shares, present, {}, {})
    granted = {s.number: w for s in shares if (w := present.get(s.number)) and w.is_granted and fits(w, s)}
    if 0 not in granted or must_ask_anew(seen, record):
        quota = Quota(queue, shares, present, {}, {})
        if policy.suspend:
            return seen, quota
        held = replace(policy, suspend=True, held=_why_held(seen, present.get(0), shares[0], queue))
        return replace(seen, job=replace(seen.job, policy=held)), quota
    useless = _useless(seen, record, granted, shares, kept)
    useful = {number: w for number, w in granted.items() if number not in useless}
    quota = Quota(queue, shares, present, useful, useless, kept)
    bounded = _bounded(policy, quota)
    slots = bounded.granted or {}
    withdrawn = _withdrawn({slot for pod in seen.pods if (slot := pod.id.slot) not in slots}, quota)
    return replace(seen, job=replace(seen.job, policy=bounded), withdrawn=withdrawn), quota


def must_ask_anew(seen: Observed, record: Record) -> bool:
    """Whether the template was edited while nothing runs: pods of the new one need quota of their own."""
    return bool(seen.job.pending_edits) and not record.members and not seen.pods


def is_on(pod: PodFact, workload: WorkloadFact, shares: Sequence[Share]) -> bool:
    """Whether a pod takes of a Workload's quota: it was made for it, or is in one of its slots."""
    slots = shares[workload.number].slots if workload.number < len(shares) else ()
    return pod.workload == workload.name or pod.id.slot in slots


def fits(workload: WorkloadFact, share: Share) -> bool:
    """Whether it asks for what is wished: a Workload cannot be changed, only given back."""
    return sorted(workload.counts) == sorted(share.counts) and not workload.is_outdated


def filled(specs: tuple[SpecShape, ...], size: int) -> dict[str, int]:
    """Give how many replicas of each spec train at a size: the base spec first."""
    found: dict[str, int] = {}
    for spec in specs:
        found[spec.name] = min(size, spec.limit)
        size -= found[spec.name]
    return found


def _useless(
    seen: Observed, record: Record, granted: Mapping[int, WorkloadFact], shares: tuple[Share, ...], kept: int
) -> dict[int, str]:
    """Find granted increments that are of no use: pods that find no place after a fault, and sizes that are not allowed.

    What was given back stays so until its time has come again. kept: the size of a base that is larger than it would be now.
    """
    assert seen.job.policy is not None
    allowed = seen.job.policy.sizes.allowed
    found = dict.fromkeys(
        (number for number in granted if number and _is_left_by_fault(seen, record, shares[number])),
        "pods that were lost to a fault find no place again",
    )
    if record.requeue_backoff is not None and seen.now < record.requeue_backoff.until:
        stays = (pod.id.slot for pod in seen.pods if pod.kill_at is None and not pod.ended)
        in_use = {member.slot for member in record.members}.union(stays)
        idle = (number for number in granted if number and in_use.isdisjoint(shares[number].slots))
        found.update(dict.fromkeys(idle, "increments were given back a short while ago"))
    left = [number for number in sorted(granted) if number not in found]
    size = sum(sum(shares[number].trains.values()) for number in left)
    while size not in allowed and size != kept:
        number = left.pop()
        size -= sum(shares[number].trains.values())
        found[number] = "it makes no allowed size as long as smaller increments have no quota"
    return found


def left_until(seen: Observed, record: Record, share: Share) -> datetime | None:
    """Give until when the pods of a share that a fault left without replicas have time to find places; None: they need none."""
    if not record.shrank_after_fault or record.transition is not None:
        return None
    if not {member.slot for member in record.members}.isdisjoint(share.slots):
        return None
    waiting = [pod.created_at for pod in seen.pods if pod.id.slot in share.slots and not (pod.node or pod.ended)]
    return min(waiting) + FAULT_PATIENCE if waiting else None


def _is_left_by_fault(seen: Observed, record: Record, share: Share) -> bool:
    until = left_until(seen, record, share)
    return until is not None and until <= seen.now


def _bounded(policy: Policy, quota: Quota) -> Policy:
    trains: Counter[str] = Counter()
    pods: Counter[str] = Counter()
    slots: dict[Slot, str] = {}
    for number, workload in quota.granted.items():
        share = quota.shares[number]
        trains.update(share.trains)
        pods.update(dict(share.counts))
        slots.update(dict.fromkeys(share.slots, workload.name))
    specs = tuple(SpecShape(s.name, trains[s.name], pods[s.name] - trains[s.name]) for s in policy.specs)
    sizes = replace(policy.sizes, allowed=policy.sizes.up_to(trains.total()))
    return replace(policy, sizes=sizes, specs=specs, full_sizes=policy.sizes, full_specs=policy.specs, granted=slots)


def _why_held(seen: Observed, base: WorkloadFact | None, share: Share, queue: str) -> Held:
    if seen.queue_trouble is not None and base is None:
        return Held(*seen.queue_trouble)
    if base is None:
        return Held("Queued", f"queue {queue} is asked for {sum(share.trains.values())} replicas")
    if base.evicted:
        return Held(base.evicted, f"Kueue takes the quota back: {base.what_evicted}")
    if base.finished:
        return Held(
            "QuotaEnded", f"Workload {base.name} was marked as finished by somebody else; delete it to ask again"
        )
    if not fits(base, share) or seen.job.pending_edits:
        return Held("SpecEdited", "the smallest size or a template was edited; quota is asked for anew")
    if not base.is_active:
        return Held("Deactivated", f"Workload {base.name} was deactivated: {base.waits or 'spec.active is false'}")
    return Held("Queued", f"waits in queue {queue}: {base.waits or 'Kueue has not looked at it yet'}")


def _withdrawn(slots: set[Slot], quota: Quota) -> dict[Slot, tuple[str, str]]:
    """Say of slots without quota why they have none."""
    if not slots:
        return {}
    share_of = {slot: share for share in quota.shares for slot in share.slots}
    return {slot: _why_withdrawn(slot, share_of.get(slot), quota) for slot in slots}


def _why_withdrawn(slot: Slot, share: Share | None, quota: Quota) -> tuple[str, str]:
    if share is None:
        return "ScaledByUser", f"replica {slot.spec}-{slot.ordinal} is beyond the largest size"
    workload = quota.present.get(share.number)
    pods = sum(pods for _, pods in share.counts)
    if workload is None:
        return "QuotaLost", f"the quota of {pods} replicas is gone: there is no Workload for increment {share.number}"
    if workload.evicted:
        return workload.evicted, f"Kueue takes the quota of {pods} replicas back: {workload.what_evicted}"
    if share.number in quota.useless:
        return "QuotaReturned", quota.useless[share.number]
    if not fits(workload, share):
        return "SpecEdited", f"the sizes were edited; the quota of {pods} replicas is given back and asked for anew"
    return "QuotaLost", f"the quota of {pods} replicas is gone: {workload.waits or 'it is not admitted any more'}"
