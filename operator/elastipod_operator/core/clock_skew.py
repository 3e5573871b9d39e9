"""Stored times in the future: an earlier operator had another clock, or the clock was set back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from .record import Record
from .record_schema import StoredField, TimeRule, timed_fields

# A difference of this size between two clocks does no harm, so such times are kept.
TOLERANCE = timedelta(seconds=5)

Change = Callable[[Any, StoredField, datetime], datetime]


def without_future_times(record: Record, now: datetime, longest: timedelta | None = None) -> Record:
    """Move times in the future to now, so that a wrong clock does not prolong any wait.

    A deadline or a wait keeps its length. longest: the longest back-off of the job.
    """
    if longest is not None:
        record = _with_times(record, _shortened_to(now + longest))
    if any(at > now + TOLERANCE for at in _past_times(record)):
        record = _with_times(record, _not_after(now))
    return record


def _past_times(value: Any) -> Iterator[datetime]:
    """Give the times of past events in the record or one of its parts."""
    for found in timed_fields(value.__class__):
        if found.part is not None:
            for part in _parts(getattr(value, found.name)):
                yield from _past_times(part)
        elif found.storage.time_rule is TimeRule.PAST and (at := getattr(value, found.name)) is not None:
            yield at


def _parts(held: Any) -> tuple[Any, ...]:
    return held if isinstance(held, tuple) else () if held is None else (held,)


def _shortened_to(latest: datetime) -> Change:
    """Give the change that ends back-offs at this time at the latest; their start is not recorded."""
    return lambda _, found, at: min(at, latest) if found.storage.time_rule is TimeRule.BACK_OFF else at


def _not_after(now: datetime) -> Change:
    def change(owner: Any, found: StoredField, at: datetime) -> datetime:
        if found.storage.time_rule is TimeRule.PAST:
            return min(at, now)
        if found.storage.time_rule is TimeRule.FOLLOWS:
            leader: datetime = getattr(owner, found.storage.follows)
            return at - max(timedelta(0), leader - now)
        return at

    return change


def _with_times(value: Any, change: Change) -> Any:
    """Give the record, or a part of it, with each time changed; the same object when no time differs."""
    changes: dict[str, Any] = {}
    for found in timed_fields(value.__class__):
        before = getattr(value, found.name)
        if before is None:
            continue
        after: Any
        if found.part is None:
            after = change(value, found, before)
        elif isinstance(before, tuple):
            after = tuple(_with_times(part, change) for part in before)
        else:
            after = _with_times(before, change)
        if after != before:
            changes[found.name] = after
    return replace(value, **changes) if changes else value
