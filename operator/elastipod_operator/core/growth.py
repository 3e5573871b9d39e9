"""Growth: when enough new replicas are ready, and when to take them."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .backoff import backoff
from .context import Context
from .depth import survives_at_any_size
from .grant import Grant
from .planned_change import begin
from .preparation import preparation_limit
from .ranks import count_trainable, usable
from .reasons import Reason
from .record import Record, TransitionKind
from .replica import Health, Replica, Replicas
from .snapshot import Policy
from .time_order import earliest
from .wording import counted

CAUSE = Reason.CAPACITY_AVAILABLE
# An agent gives its fork server two minutes; growth does not wait longer for an agent that reports warming.
WARMING_LIMIT = timedelta(seconds=150)


def possible_size(record: Record, replicas: Replicas, grant: Grant) -> int:
    """Give the largest allowed size with the members and all ready replicas."""
    return _size_with(replicas.candidates(), record, grant)


def warming_until(replica: Replica) -> datetime | None:
    """Give when a new replica may join although its fork server still imports modules; None if it has finished.

    Until then training continues without it, so that the other replicas do not wait for its imports.
    """
    since = replica.agent.answering_since
    return since + WARMING_LIMIT if replica.agent.warming and since is not None else None


def warm(candidates: list[Replica], now: datetime) -> list[Replica]:
    """Give the replicas whose workers would start quickly."""
    return [r for r in candidates if (until := warming_until(r)) is None or until <= now]


def _size_with(candidates: list[Replica], record: Record, grant: Grant) -> int:
    ready = {r.id for r in candidates}
    return grant.sizes.fit(count_trainable({*record.members, *ready}, grant))


def growth_window(record: Record, context: Context, members: list[Replica]) -> tuple[Record, datetime | None]:
    """Open, keep or close the window in which ready increments are collected."""
    size = len(record.members)
    candidates = context.replicas.candidates()
    quick = warm(candidates, context.now)
    possible = _size_with(quick, record, context.grant)
    waits = (until for r in candidates if (until := warming_until(r)) is not None and until > context.now)
    warm_at = min(waits, default=None)
    # A voluntary resize does not begin while a member does not answer: its drain would end in a recovery.
    all_answer = len(members) == size and all(r.health is Health.GOOD for r in members)
    if possible <= size or record.running_since is None or not all_answer:
        return record if record.window_since is None else replace(record, window_since=None), warm_at
    opened = record.window_since or context.now
    due = growth_due(replace(record, window_since=opened), context.policy, context.key, context.replicas)
    assert due is not None
    if context.now < due:
        return replace(record, window_since=opened), earliest(due, warm_at)
    newcomers = [
        r for r in usable([*members, *quick], record, context.grant)[:possible] if r.id not in record.member_set
    ]
    prepared_by = preparation_limit(newcomers, record, context, due)
    if prepared_by is not None:
        return replace(record, window_since=opened), earliest(prepared_by, warm_at)
    message = counted(possible - size, "more replica is ready", "more replicas are ready")
    return begin(record, context, TransitionKind.RESIZE, CAUSE, message, target_size=possible), None


def growth_due(record: Record, policy: Policy, key: str, replicas: Replicas) -> datetime | None:
    """Give when the open window closes: after scalingTimeout, the snooze, the stable period and the back-off."""
    return max((at for at, _ in _timers(record, policy, key, replicas)), default=None)


def growth_timer(record: Record, policy: Policy, key: str, replicas: Replicas) -> str:
    """Name the setting that the growth waits for; empty while no window is open."""
    return max(_timers(record, policy, key, replicas), default=(datetime.min, ""), key=lambda timer: timer[0])[1]


def _timers(record: Record, policy: Policy, key: str, replicas: Replicas) -> list[tuple[datetime, str]]:
    """Give what an open window waits for, each with the name of its setting."""
    if record.window_since is None:
        return []
    found = [(record.window_since + policy.scaling_timeout, f"scalingTimeoutInSeconds={_s(policy.scaling_timeout)}")]
    if record.recovered_at is not None:
        found.append((record.recovered_at + policy.snooze, f"scaleUpSnoozeTimeInSeconds={_s(policy.snooze)}"))
    if record.resized_at is not None:
        found.append((record.resized_at + policy.min_stable, f"minStableSeconds={_s(policy.min_stable)}"))
    if _brings_replacements(record, policy, replicas):
        found = [(record.window_since, f"faultyScaleDownTimeoutInSeconds={_s(policy.faulty_timeout)}")]
    if record.resize_failures and record.resize_failed_at is not None:
        wait = backoff(policy.backoff_base, policy.backoff_max, record.resize_failures, key)
        found.append((record.resize_failed_at + wait, "spec.elastipod.backoff"))
    return found


def _brings_replacements(record: Record, policy: Policy, replicas: Replicas) -> bool:
    """Whether the window opened while a recovery would still have waited for replacements, had it not gone on without them."""
    if not record.shrank_after_fault or record.recovered_at is None or record.window_since is None:
        return False
    is_in_time = record.window_since < record.recovered_at + policy.faulty_timeout
    return is_in_time and survives_at_any_size(record, replicas, policy)


def _s(span: timedelta) -> int:
    return int(span.total_seconds())


def growth_failed(record: Record, now: datetime) -> Record:
    """Note that a growth failed: the next one waits (consecutiveScalingFailures)."""
    return replace(record, size_before_growth=0, resize_failures=record.resize_failures + 1, resize_failed_at=now)


def mark_interrupted_growth(record: Record, now: datetime) -> Record:
    """Note a failed growth if a fault interrupts it, or comes before the larger generation was RUNNING."""
    transition = record.transition
    is_growing = transition is not None and transition.kind is TransitionKind.RESIZE and transition.cause == CAUSE
    return growth_failed(record, now) if is_growing or record.size_before_growth else record
