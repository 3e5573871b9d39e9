"""Partial gangs: nodes that are too few for the minimum size, or for an increment, are released.

Otherwise two jobs could wait for each other's nodes for ever. One pending pod remains, so that autoscalers see the demand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from .actions import JobEvent
from .backoff import backoff, jitter
from .context import Context
from .grant import Grant
from .incarnations import record_incarnations
from .names import Slot
from .ranks import count_trainable, count_within_limits
from .reasons import Reason
from .record import PartialGang, Record
from .replica import Replicas
from .slots import is_placed, spare_slots
from .time_order import earliest
from .wording import counted

PATIENCE = timedelta(seconds=120)
# The wait differs from job to job by up to half, so that one of two jobs that block each other gives way first.
PATIENCE_SPREAD = 0.5
# A job that trains keeps requesting an increment that only partly fits, with a growing back-off.
LONGEST_REST = timedelta(hours=1)
# The pending pod returns this long after the nodes were released, so that waiting jobs are placed first.
DEMAND_PAUSE = timedelta(seconds=20)


@dataclass(frozen=True, slots=True)
class PlacedPods:
    """Pods that have a node: `whole` of them can train together, `partial` more are not enough for the next size."""

    whole: int
    partial: int


def count_placed_pods(record: Record, replicas: Replicas, grant: Grant) -> PlacedPods:
    """Count the job's pods that have a node."""
    bound = [r.id for r in replicas.newest.values() if is_placed(r)]
    if record.transition is not None:
        whole = grant.sizes.fit(count_trainable(bound, grant))
        return PlacedPods(whole, 0 if whole else count_within_limits(bound, grant))
    held = {*record.members, *bound}
    whole = max(len(record.members), grant.sizes.fit(count_trainable(held, grant)))
    return PlacedPods(whole, max(0, count_within_limits(held, grant) - whole))


def _is_short(replicas: Replicas) -> bool:
    """Whether a pod waits for a node."""
    return any(r.may_train and not r.pod.node for r in replicas.newest.values())


def follow_partial_gang(record: Record, context: Context) -> tuple[Record, tuple[JobEvent, ...]]:
    """Handle a partial gang or increment: wait, release its nodes, back off, try again.

    The back-off grows each time. It ends early when capacity becomes free.
    """
    replicas, now, key = context.replicas, context.now, context.key
    have, gang = count_placed_pods(record, replicas, context.grant), record.gang
    if gang is not None and gang.released_until is not None:
        is_over = now >= gang.released_until or (
            replicas.capacity_freed_at is not None and replicas.capacity_freed_at > gang.since + DEMAND_PAUSE
        )
        if not is_over or not have.partial:
            return record, ()
        return replace(record, gang=PartialGang(now, have.partial, gang.tries)), ()
    if not have.partial or not (context.is_refused or _is_short(replicas)):
        return _stop_waiting(record, now), ()
    if gang is None or have.partial > gang.bound:
        return replace(record, gang=PartialGang(now, have.partial, gang.tries if gang else 0)), ()
    if now < _patience(gang, key):
        return record, ()
    return _give_back(record, context, have.partial)


def _stop_waiting(record: Record, now: datetime) -> Record:
    gang = record.gang
    if gang is None or not gang.tries:
        return record if gang is None else replace(record, gang=None)
    return record if not gang.bound else replace(record, gang=PartialGang(now, 0, gang.tries))


def _patience(gang: PartialGang, key: str) -> datetime:
    return gang.since + PATIENCE * (1 + PATIENCE_SPREAD * jitter(key, gang.tries))


def _give_back(record: Record, context: Context, number: int) -> tuple[Record, tuple[JobEvent, ...]]:
    assert record.gang is not None
    policy, now = context.policy, context.now
    tries = record.gang.tries + 1
    limit = policy.backoff_max if record.transition is not None else max(policy.backoff_max, LONGEST_REST)
    rest = DEMAND_PAUSE + backoff(policy.backoff_base, limit, tries, context.key)
    waited_s = (now - record.gang.since).total_seconds()
    what = "the minimum size" if record.transition is not None else "a whole increment"
    text = (
        f"{counted(number, 'pod had a node', 'pods had nodes')} for {waited_s:.0f} s, too few for {what}: the nodes are released, "
        "and one pod waits for room"
    )
    # The released pods cannot be the cause of a later fault.
    members = () if record.transition is not None else record.members
    resting = replace(
        record_incarnations(record, context.replicas.by_id),
        members=members,
        gang=PartialGang(now, 0, tries, now + rest),
    )
    return resting, (JobEvent(Reason.PLACES_GIVEN_BACK, text),)


def next_gang_check(record: Record, key: str, now: datetime) -> datetime | None:
    """Give when a partial gang must be checked again; while its pending pod waits for a node, the watch reports it."""
    gang = record.gang
    if gang is None:
        return None
    if gang.released_until is None:
        return _patience(gang, key) if gang.bound else None
    return earliest(*(at for at in (gang.since + DEMAND_PAUSE, gang.released_until) if at > now))


def restrict_slots(wanted: list[Slot], record: Record, replicas: Replicas, grant: Grant, now: datetime) -> list[Slot]:
    """Give the wanted slots while nodes are released: those in use, and one that shows the demand."""
    gang = record.gang
    if gang is None or gang.released_until is None:
        return wanted
    members = {member.slot for member in record.members} if record.transition is None else set()
    whole = count_placed_pods(record, replicas, grant).whole if record.transition is None else 0
    spares = spare_slots(grant, wanted) - members  # no gang waits for them
    others = [s for s in wanted if s not in members and s not in spares]
    others.sort(key=lambda s: not is_placed(replicas.newest.get(s)))
    demand = 1 if now >= gang.since + DEMAND_PAUSE else 0
    return [
        *(s for s in wanted if s in members),
        *others[: whole - len(members) + demand if members else demand],
        *(s for s in wanted if s in spares and is_placed(replicas.newest.get(s))),
    ]
