"""Asking Kueue for quota, and giving back what is not used any more (docs/design/queues.md, spec 40).

Asking is greedy: increments wait in the queue until they are granted. Giving back waits until the pods are gone (decision 6).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from .actions import (
    Action,
    AskWorkload,
    DropWorkload,
    FinishWorkload,
    MarkPodsReady,
    NameQueue,
    Note,
    RankWorkload,
    ReleaseBase,
    SetFinalizer,
)
from .backoff import backoff
from .context import Step
from .ending import deletion_due_at
from .health import Health, Replica, View
from .membership import remove, soonest, soonest_allowed
from .names import Slot
from .payback import growth_hold
from .quota import Quota, Share, filled, fits, is_on, left_until, shares_in_force
from .record import Record, RequeueBackoff
from .snapshot import Observed, Policy, WorkloadFact

# Of the increments of one job so many wait in the queue at a time: a job of thousands must not flood Kueue.
MAX_WAITING = 16
# An increment that is taken back so long after the last one begins a new row of attempts.
SHED_MEMORY = timedelta(minutes=30)
# A job that is being deleted stays so long after its last pods had to be gone, for quota that cannot be given back.
RETURN_PATIENCE = timedelta(seconds=60)


def with_asks(step: Step, seen: Observed, view: View, quota: Quota | None) -> Step:
    """Add what is to be asked of Kueue and given back to it. seen: bounded by the quota, as `under_quota` gives it."""
    record = step.record
    is_new = seen.job.record is None or not seen.job.was_seen
    if record.queue and record.queue != seen.job.queue and is_new:
        step = step.also(NameQueue(record.queue))
    if seen.job.policy is None:
        return step.also(*_without_wishes(record, seen, view))
    if quota is None:
        return step
    if record.outcome:
        return step.also(*_finishes(record, view, quota))
    policy = seen.job.policy
    record, drops, notes = _drops(record, seen, view, quota, policy)
    asks, wake = _asks(record, seen, view, quota, policy)
    marks = _marks(view, quota, policy)
    waits = (left_until(seen, record, quota.shares[number]) for number in quota.granted if number)
    wake = soonest(step.wake_at, wake, *waits)
    step = replace(step, record=record, notes=(*step.notes, *notes), wake_at=wake)
    return step.also(*drops, *_ranks(quota), *asks, *marks)


def _without_wishes(record: Record, seen: Observed, view: View) -> list[Action]:
    """Have a job whose spec cannot be used keep no quota that others wait for: a user's error is nobody else's.

    Its agents cannot be called, for that needs the spec: the kubelet ends the pods, as in any eviction.
    """
    if record.outcome:
        return _finishes(record, view, Quota("", (), {w.number: w for w in seen.workloads}, {}, {}))
    actions: list[Action] = []
    for workload in seen.workloads:
        if not workload.evicted or workload.is_deleting:
            continue
        pods = _pods_on(workload, (), view)
        for replica in pods:
            actions += remove(replica, f"Kueue takes the quota back: {workload.what_evicted}")
        if not pods:
            actions.append(DropWorkload(workload.name, workload.uid, workload.what_evicted or workload.evicted))
    return actions


def with_returns(step: Step, seen: Observed, view: View) -> Step:
    """Have a job that is being deleted give its quota back, and stay until that is done.

    What still waits goes at once, so that Kueue cannot grant it any more; the rest goes as its pods do. What is marked as finished
    holds no quota, and is left to the garbage collector; so is what cannot be given back for too long, when no pod is left.
    """
    left = [w for w in seen.workloads if not (w.finished or w.is_deleting)]
    if not (left or seen.return_trouble):
        return step
    base = next((w for w in seen.workloads if w.number == 0), None)
    shares = shares_in_force(seen.job.policy, base) if seen.job.policy is not None else ()
    drops = [
        DropWorkload(w.name, w.uid, "the job is deleted")
        for w in sorted(left, key=lambda w: (w.number == 0, w.number))
        if not (w.reserved and _pods_on(w, shares, view))
    ]
    if step.actions != (SetFinalizer(False),):
        return step.also(*drops)
    given_up_at = returns_until(seen)
    if seen.return_trouble and seen.now >= given_up_at:
        return step
    return replace(step, actions=tuple(drops), wake_at=given_up_at if seen.return_trouble else None)


def returns_until(seen: Observed) -> datetime:
    """Give until when a job that is being deleted stays for quota that cannot be given back."""
    return deletion_due_at(seen) + RETURN_PATIENCE


def rest_until(record: Record, now: datetime) -> datetime | None:
    """Give until when places for less than a whole gang or increment are left to others; None when they are not."""
    until = record.gang.rest_until if record.gang is not None else None
    return until if until is not None and now < until else None


def resting_slots(record: Record, quota: Quota, now: datetime) -> frozenset[Slot]:
    """Give the slots that need no pod while places are given back: those of shares of which nobody trains."""
    if rest_until(record, now) is None:
        return frozenset()
    return frozenset(slot for share in quota.shares if not _is_in_use(share, record) for slot in share.slots)


def increments_from(record: Record, policy: Policy, now: datetime) -> datetime | None:
    """Give until when no increment is asked for; None when they are: after faults, losses of quota, and vain attempts."""
    snooze = record.recovered_at + policy.snooze if record.recovered_at is not None else None
    shed = record.requeue_backoff.until if record.requeue_backoff is not None else None
    until = soonest_allowed(rest_until(record, now), snooze, shed, growth_hold(record, policy))
    return until if until is not None and until > now else None


def _finishes(record: Record, view: View, quota: Quota) -> list[Action]:
    """Tell Kueue of the end. An increment that waits goes at once: Kueue could grant it while it is told that the job has ended."""
    succeeded = record.outcome == "Completed"
    actions: list[Action] = []
    for number, workload in quota.present.items():
        if workload.finished or workload.is_deleting:
            continue
        if number and not workload.reserved:
            actions.append(DropWorkload(workload.name, workload.uid, "the job has ended"))
        elif not _pods_on(workload, quota.shares, view):
            actions.append(FinishWorkload(workload.name, workload.uid, succeeded, record.outcome_message))
    return actions


def _drops(
    record: Record, seen: Observed, view: View, quota: Quota, policy: Policy
) -> tuple[Record, list[Action], list[Note]]:
    """Give back what is not wanted any more, once its pods are gone. What Kueue took back is not asked for again at once."""
    actions: list[Action] = []
    notes: list[Note] = []
    shed = [
        w for n, w in sorted(quota.present.items()) if n and (w.evicted or n in quota.useless) and not w.is_deleting
    ]
    # Increments go before their base is given back: Kueue may place it elsewhere, and they were pinned to where it was.
    for number, workload in sorted(quota.present.items(), key=lambda item: (item[0] == 0, item[0])):
        why = _why_unwanted(number, workload, record, seen, quota, policy)
        if not why or workload.is_deleting:
            continue
        is_empty = not (workload.reserved and _pods_on(workload, quota.shares, view))
        if number in quota.useless or (number and workload.evicted and is_empty):
            record, note = _shed(record, shed, policy, seen)
            notes += [note] if note is not None else []
        if not is_empty:
            continue
        if number == 0 and workload.evicted:
            if not _increments_left(quota):
                actions.append(ReleaseBase(workload.name, workload.uid))
        else:
            actions.append(DropWorkload(workload.name, workload.uid, why))
    return record, actions, notes


def _why_unwanted(
    number: int, workload: WorkloadFact, record: Record, seen: Observed, quota: Quota, policy: Policy
) -> str:
    """Say why a Workload is to go; empty when it is to stay."""
    if workload.evicted:
        return workload.what_evicted or workload.evicted
    if not quota.queue:
        return "the job is in no queue any more"
    if policy.suspend and policy.held is None:
        return "the user suspended the job"
    if number >= len(quota.shares):
        return "the job may not grow so far any more"
    if not fits(workload, quota.shares[number]):
        return "the sizes or templates of the job were edited"
    if not workload.reserved and workload.queue != quota.queue:
        return f"the job is in queue {quota.queue} now"
    if number == 0:
        return ""
    if 0 not in quota.granted:
        return "the base of the job has no quota"
    if number in quota.useless:
        return quota.useless[number]
    if rest_until(record, seen.now) is not None and not _is_in_use(quota.shares[number], record):
        return "there was room for a part of it only"
    return "it was marked as finished by somebody else" if workload.finished else ""


def _is_in_use(share: Share, record: Record) -> bool:
    return record.transition is None and not {m.slot for m in record.members}.isdisjoint(share.slots)


def _increments_left(quota: Quota) -> list[WorkloadFact]:
    """Give the increments that hold quota or could be granted some."""
    return [w for number, w in quota.present.items() if number and not (w.is_deleting or w.finished)]


def _pods_on(workload: WorkloadFact, shares: Sequence[Share], view: View) -> list[Replica]:
    """Give the pods on a Workload's quota that are not gone yet."""
    return [r for r in view.by_id.values() if not r.gone and is_on(r.pod, workload, shares)]


def _shed(
    record: Record, workloads: Sequence[WorkloadFact], policy: Policy, seen: Observed
) -> tuple[Record, Note | None]:
    """Note that increments were taken back: those that go together are told of together, with the first that is empty."""
    shed = record.requeue_backoff
    if shed is not None and seen.now < shed.until:
        return record, None
    tries = shed.tries + 1 if shed is not None and seen.now - shed.until < SHED_MEMORY else 1
    until = seen.now + backoff(policy.backoff_base, policy.backoff_max, tries, seen.job.uid)
    pods = sum(count for w in workloads for _, count in w.counts)
    names = ", ".join(str(w.number) for w in workloads)
    what = f"{'increments' if len(workloads) > 1 else 'increment'} {names}"
    queues = ", ".join(dict.fromkeys(w.queue for w in workloads))
    note = Note("QuotaGivenBack", f"the quota of {pods} replicas ({what}) is given back to queue {queues}")
    return replace(record, requeue_backoff=RequeueBackoff(tries, until)), note


def _ranks(quota: Quota) -> list[Action]:
    """Have priorities follow the job's classes, as far as Kueue allows that."""
    ranked = (w for w in quota.present.values() if w.is_misranked and not w.is_rank_fixed)
    return [RankWorkload(w.name, w.uid) for w in ranked if quota.queue and not (w.finished or w.is_deleting)]


def _asks(
    record: Record, seen: Observed, view: View, quota: Quota, policy: Policy
) -> tuple[list[Action], datetime | None]:
    if not quota.queue or (policy.suspend and policy.held is None):
        return [], None
    if 0 not in quota.present:
        # Kueue may place a new base elsewhere: nothing of the job may be left where the last one was.
        is_clear = all(r.gone for r in view.by_id.values()) and not _increments_left(quota)
        return ([AskWorkload(0, quota.shares[0].counts, quota.queue)] if is_clear else []), None
    if 0 not in quota.granted:
        return [], None
    missing = [share for share in quota.shares[1:] if share.number not in quota.present]
    until = increments_from(record, policy, seen.now)
    if until is not None:
        return [], until if missing else None
    if _is_uneven(quota) and len(quota.granted) < len(quota.present):
        return [], None  # where steps differ, a larger one is of no use without the smaller ones
    waiting = sum(not w.admitted for w in quota.present.values())
    room = 1 if _is_uneven(quota) else max(0, MAX_WAITING - waiting)
    base = quota.granted[0]
    return [AskWorkload(share.number, share.counts, base.queue) for share in missing[:room]], None


def _is_uneven(quota: Quota) -> bool:
    """Whether the increments differ in size: then not every set of them makes an allowed size."""
    return len({sum(share.trains.values()) for share in quota.shares[1:]}) > 1


def _marks(view: View, quota: Quota, policy: Policy) -> list[Action]:
    """Tell Kueue of the pods of the granted shares: spares are not waited for, and stand in for others.

    The job's ready pods count for its base first. Where there are too few, Kueue may then take an increment back, whose pods
    hold the places that those of the base wait for; the base would stop the whole job.
    """
    actions: list[Action] = []
    slots = (slot for number in quota.granted for slot in quota.shares[number].slots)
    ready = Counter(s.spec for s in slots if (r := view.newest.get(s)) is not None and _is_ready(r))
    for number, workload in sorted(quota.granted.items()):
        trains = Counter(quota.shares[number].trains)
        if quota.kept_base and not number:  # the job may be smaller than its base by now
            trains = Counter(filled(policy.wished_specs, min(quota.kept_base, policy.wished_sizes.maximum)))
        is_ready = trains <= ready
        ready -= trains
        if is_ready != bool(workload.pods_ready):
            actions.append(MarkPodsReady(workload.name, workload.uid, is_ready, workload.pods_ready is not None))
    return actions


def _is_ready(replica: Replica) -> bool:
    return replica.health in (Health.GOOD, Health.SILENT) or replica.pod.phase == "Succeeded"
