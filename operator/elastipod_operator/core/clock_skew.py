"""Times on record that lie in the future: an operator before this one had another clock, or its clock was set back."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from .record import Gang, Record, Transition

# Clocks of two machines differ by so much without any harm; what is less is left as it is written.
TOLERANCE = timedelta(seconds=5)


def not_later(record: Record, now: datetime, longest: timedelta | None = None) -> Record:
    """Take what is said to happen later than now for what happens now: no wait gets longer for a clock that was wrong.

    What was to last until some time lasts as long as it was meant to. longest: the longest back-off of the job.
    """
    shed = record.shed
    if shed is not None and longest is not None and shed.until > now + longest:  # when it began is not on record
        record = replace(record, shed=replace(shed, until=now + longest))
    if not any(at is not None and at > now + TOLERANCE for at in _times(record)):
        return record
    window, ledger = record.window, record.ledger
    return replace(
        record,
        transition=_begun(record.transition, now) if record.transition is not None else None,
        window_since=_at(record.window_since, now), begun_at=_at(record.begun_at, now), pods_at=_at(record.pods_at, now),
        settled_at=_at(record.settled_at, now),
        resized_at=_at(record.resized_at, now), recovered_at=_at(record.recovered_at, now),
        incident_at=_at(record.incident_at, now), accepted_at=_at(record.accepted_at, now), started_at=_at(record.started_at, now),
        resize_failed_at=_at(record.resize_failed_at, now), paused_at=_at(record.paused_at, now),
        ended_at=_at(record.ended_at, now),
        window=replace(window, since=_at(window.since, now)), ledger=replace(ledger, since=_at(ledger.since, now)),
        offences=tuple(replace(o, at=min(o.at, now)) for o in record.offences),
        gang=_waited(record.gang, now) if record.gang is not None else None,
    )  # fmt: skip


def _times(record: Record) -> list[datetime | None]:
    begun = [record.transition.began_at, record.transition.detected_at] if record.transition is not None else []
    return [
        *begun, record.window_since, record.begun_at, record.pods_at, record.settled_at, record.resized_at, record.recovered_at,
        record.incident_at, record.accepted_at,
        record.started_at, record.resize_failed_at, record.paused_at, record.ended_at, record.window.since,
        record.ledger.since, *(o.at for o in record.offences), record.gang.since if record.gang is not None else None,
    ]  # fmt: skip


def _at(at: datetime | None, now: datetime) -> datetime | None:
    return None if at is None else min(at, now)


def _begun(transition: Transition, now: datetime) -> Transition:
    early = max(timedelta(0), transition.began_at - now)
    not_before = transition.not_before
    return replace(
        transition, began_at=transition.began_at - early, detected_at=min(transition.detected_at, now),
        deadline=transition.deadline - early, not_before=None if not_before is None else not_before - early,
    )  # fmt: skip


def _waited(gang: Gang, now: datetime) -> Gang:
    early = max(timedelta(0), gang.since - now)
    return replace(
        gang, since=gang.since - early, rest_until=None if gang.rest_until is None else gang.rest_until - early
    )
