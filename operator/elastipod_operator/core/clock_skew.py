"""Times on record that lie in the future: an operator before this one had another clock, or its clock was set back."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .record import PartialGang, Record, Transition

# Clocks of two machines differ by so much without any harm; what is less is left as it is written.
TOLERANCE = timedelta(seconds=5)


def without_future_times(record: Record, now: datetime, longest: timedelta | None = None) -> Record:
    """Take what is said to happen later than now for what happens now: no wait gets longer for a clock that was wrong.

    What was to last until some time lasts as long as it was meant to. longest: the longest back-off of the job.
    """
    shed = record.requeue_backoff
    if shed is not None and longest is not None and shed.until > now + longest:  # when it began is not on record
        record = replace(record, requeue_backoff=replace(shed, until=now + longest))
    if not any(at is not None and at > now + TOLERANCE for at in _times(record)):
        return record
    window, phase_times = record.window, record.phase_times
    return replace(
        record,
        transition=_begun(record.transition, now) if record.transition is not None else None,
        window_since=_at(record.window_since, now),
        generation_began_at=_at(record.generation_began_at, now),
        first_pod_at=_at(record.first_pod_at, now),
        running_since=_at(record.running_since, now),
        resized_at=_at(record.resized_at, now),
        recovered_at=_at(record.recovered_at, now),
        fault_at=_at(record.fault_at, now),
        accepted_at=_at(record.accepted_at, now),
        started_at=_at(record.started_at, now),
        resize_failed_at=_at(record.resize_failed_at, now),
        resize_began_at=_at(record.resize_began_at, now),
        ended_at=_at(record.ended_at, now),
        window=replace(window, since=_at(window.since, now)),
        phase_times=replace(phase_times, since=_at(phase_times.since, now)),
        node_faults=tuple(replace(o, at=min(o.at, now)) for o in record.node_faults),
        gang=_waited(record.gang, now) if record.gang is not None else None,
    )


def _times(record: Record) -> list[datetime | None]:
    begun = [record.transition.began_at, record.transition.detected_at] if record.transition is not None else []
    return [
        *begun,
        record.window_since,
        record.generation_began_at,
        record.first_pod_at,
        record.running_since,
        record.resized_at,
        record.recovered_at,
        record.fault_at,
        record.accepted_at,
        record.started_at,
        record.resize_failed_at,
        record.resize_began_at,
        record.ended_at,
        record.window.since,
        record.phase_times.since,
        *(o.at for o in record.node_faults),
        record.gang.since if record.gang is not None else None,
    ]


def _at(at: datetime | None, now: datetime) -> datetime | None:
    return None if at is None else min(at, now)


def _begun(transition: Transition, now: datetime) -> Transition:
    early = max(timedelta(0), transition.began_at - now)
    not_before = transition.not_before
    return replace(
        transition, began_at=transition.began_at - early, detected_at=min(transition.detected_at, now),
        deadline=transition.deadline - early, not_before=None if not_before is None else not_before - early,
    )  # fmt: skip


def _waited(gang: PartialGang, now: datetime) -> PartialGang:
    early = max(timedelta(0), gang.since - now)
    return replace(
        gang, since=gang.since - early, rest_until=None if gang.rest_until is None else gang.rest_until - early
    )
