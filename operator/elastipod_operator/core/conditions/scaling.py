"""Condition Scaling: why the job has the size that it has."""

from __future__ import annotations

from datetime import datetime

from ..context import Context
from ..growth import growth_due, growth_timer
from ..growth_mode import GrowthMode
from ..payback import growth_hold
from ..preparation import PREPARATION_LIMIT, is_on_its_way
from ..quota import Quota
from ..quota_requests import increments_requested_from
from ..reasons import Reason
from ..record import Record
from ..replica import Health
from ..slots import wanted_slots
from ..snapshot import Policy, Snapshot
from ..wording import counted
from .draft import ConditionDraft, avoidance, first_problem, time_of_day


def describe(record: Record, context: Context) -> tuple[ConditionDraft | None, datetime | None]:
    """Say why the job has its present size. The condition needs no check of its own: each of its waits has one already."""
    return _scaling(record, context), None


def _scaling(record: Record, context: Context) -> ConditionDraft | None:
    snapshot, replicas, policy, quota = context.snapshot, context.replicas, context.policy, context.quota
    size = len(record.members)
    if not size or record.transition is not None:
        return None
    maximum = policy.sizes.maximum
    if quota is not None and context.grant.sizes.maximum <= size < maximum:
        return _queued(snapshot, record, policy, quota)
    if size >= maximum:
        return ConditionDraft(
            "Scaling",
            False,
            Reason.AT_MAXIMUM,
            f"{counted(size, 'replica trains', 'replicas train')}, which is the maximum{_bound(policy)}",
        )
    due = growth_due(record, policy, snapshot.job.uid, replicas)
    members = frozenset(record.members)
    if due is not None and due <= snapshot.now:
        preparing = [r for r in replicas.candidates() if r.id not in members and is_on_its_way(r)]
        starts = counted(len(preparing), "more replica starts its", "more replicas start their")
        until = time_of_day(due + PREPARATION_LIMIT)
        text = f"{starts} workers ahead while training continues; the job grows when they are ready, at {until} at the latest"
        if not preparing:
            text = (
                f"new workers of the present size still start; the job grows when they train, at {until} at the latest"
            )
        return ConditionDraft("Scaling", False, Reason.WARMING_UP, text)
    if due is not None:
        failed = f"; growths that failed in a row: {record.resize_failures}" if record.resize_failures else ""
        timer = growth_timer(record, policy, snapshot.job.uid, replicas)
        text = f"more replicas are ready; the job grows at about {time_of_day(due)} ({timer}{failed})"
        return ConditionDraft("Scaling", False, Reason.GROWING, text)
    loading = [r for r in replicas.candidates() if r.id not in members and r.agent.warming]
    if loading:
        text = f"{counted(len(loading), 'more replica imports', 'more replicas import')} the modules that workers need; training continues"
        return ConditionDraft("Scaling", False, Reason.WARMING_UP, text)
    if snapshot.pod_creation_error:
        return ConditionDraft(
            "Scaling",
            False,
            Reason.LIMIT_REACHED,
            f"{_wanted(maximum - size)}: {snapshot.pod_creation_error}",
        )
    gang = record.gang
    if gang is not None and gang.released_until is not None:
        text = f"there was room for a part of an increment, and it was released; next attempt at {time_of_day(gang.released_until)}"
        return ConditionDraft("Scaling", False, Reason.WAITING_FOR_CAPACITY, text)
    asked = [r for r in replicas.newest.values() if r.id not in members and r.health in (Health.PENDING, Health.GOOD)]
    hold = growth_hold(record, policy)
    if hold is not None and hold > snapshot.now and not asked:
        text = f"growing now would cost more time than it saves; next attempt at {time_of_day(hold)}"
        return ConditionDraft("Scaling", False, Reason.NOT_WORTHWHILE, text)
    if policy.growth is GrowthMode.SPARE_CAPACITY_ONLY and not asked:
        capacity = snapshot.spare_capacity
        why = (capacity.problem if capacity is not None else "") or "no node has room for the next size"
        return ConditionDraft(
            "Scaling", False, Reason.NO_SPARE_CAPACITY, f"{counted(maximum - size, 'more replica')} may train: {why}"
        )
    waiting = [
        r for slot in wanted_slots(context.grant, record, replicas)
        if (r := replicas.newest.get(slot)) is not None and r.id not in members and not r.ready
    ]  # fmt: skip
    wait = f"{counted(len(waiting), 'pod waits', 'pods wait')}{avoidance(record, context)}{first_problem(waiting)}"
    text = f"{_wanted(maximum - size)} and {wait}"
    return ConditionDraft("Scaling", False, Reason.WAITING_FOR_CAPACITY, text)


def _queued(snapshot: Snapshot, record: Record, policy: Policy, quota: Quota) -> ConditionDraft:
    """Say what the increments wait for, in Kueue's own words."""
    wanted = _wanted(policy.sizes.maximum - len(record.members))
    waiting = [w for number, w in sorted(quota.present.items()) if number and not w.admitted]
    until = increments_requested_from(record, policy, snapshot.now)
    if waiting:
        why = next((w.pending_message for w in waiting if w.pending_message), "Kueue has not considered it yet")
        return ConditionDraft(
            "Scaling",
            False,
            Reason.QUEUED,
            f"{wanted}; the request waits in queue {quota.queue}: {why}",
        )
    if until is not None:
        text = f"{wanted}; next request to queue {quota.queue} at {time_of_day(until)}"
        return ConditionDraft("Scaling", False, Reason.QUEUED, text)
    why = f": {snapshot.queue_problem[1]}" if snapshot.queue_problem is not None else ""
    return ConditionDraft("Scaling", False, Reason.QUEUED, f"{wanted}; requesting quota from queue {quota.queue}{why}")


def _bound(policy: Policy) -> str:
    """Name the field that limits the size, as the end of a sentence."""
    return f": limited by {policy.sizes.bound}" if policy.sizes.bound else ""


def _wanted(number: int) -> str:
    return counted(number, "more replica is wanted", "more replicas are wanted")
