"""Growth that would cost more time than it gains is delayed before its pods are created."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .record import Record, ResizeStatistics
from .replica import Replicas
from .snapshot import Policy
from .time_order import latest

PAUSES = 10
LONGEST = timedelta(minutes=15)
MAX_PACES = 4


def record_step_time(record: Record, replicas: Replicas) -> Record:
    """Record the step time at the present size when a generation that trained ends."""
    if record.running_since is None or record.transition is not None:
        return record
    paces = [r.agent.step_pace for m in record.members if (r := replicas.get(m)) is not None and r.agent.step_pace]
    if not paces:
        return record
    size, pace = len(record.members), min(paces)
    others = [row for row in record.resize_statistics.step_times if row[0] != size]
    return replace(
        record, resize_statistics=replace(record.resize_statistics, step_times=(*others, (size, pace))[-MAX_PACES:])
    )


def record_resize_pause(record: Record, now: datetime) -> Record:
    """Record how long training paused in the planned resize that has just reached RUNNING."""
    if record.resize_began_at is None:
        return record
    return replace(
        record,
        resize_began_at=None,
        resize_statistics=replace(record.resize_statistics, pause=now - record.resize_began_at),
    )


def growth_hold(record: Record, policy: Policy) -> datetime | None:
    """Give until when no growth is requested; None if it may be. It needs a measured pause and a measured gain of this job.

    The last resize must pay off first: pause * speed now / (speed then - speed now), at most ten pauses and a quarter of an
    hour after the last change. Pods that exist already never wait.
    """
    since = latest(record.running_since, record.resized_at, record.recovered_at)
    delay = _delay(record.resize_statistics, len(record.members))
    if not policy.payback or delay is None or since is None or record.transition is not None:
        return None
    return since + delay


def _delay(resize_statistics: ResizeStatistics, size: int) -> timedelta | None:
    paces = dict(resize_statistics.step_times)
    larger = [other for other in paces if other > size]
    if resize_statistics.pause is None or size not in paces or not larger:
        return None
    limit = min(PAUSES * resize_statistics.pause, LONGEST)
    now, then = paces[size].total_seconds(), paces[max(larger)].total_seconds()
    if not 0 < then < now:
        return limit
    # speeds are 1/now and 1/then
    return min(limit, resize_statistics.pause * (then / (now - then)))
