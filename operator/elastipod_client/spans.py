"""Times and spans of time in words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def span_text(span: timedelta) -> str:
    """Give a span with its two largest units: "45 s", "4 min", "2 h 5 min", "3 d 4 h"."""
    if span < 2 * MINUTE:
        return f"{max(0, int(span.total_seconds()))} s"
    if span < HOUR:
        return f"{span // MINUTE} min"
    if span < DAY:
        return f"{span // HOUR} h {span % HOUR // MINUTE} min"
    return f"{span // DAY} d {span % DAY // HOUR} h"


def time_text(at: datetime, now: datetime) -> str:
    """Give a time of the last 12 hours as the time of day, and others with their date."""
    at = at.astimezone(UTC)
    return f"{at:%H:%M:%S} UTC" if abs(now - at) < 12 * HOUR else f"{at:%Y-%m-%d %H:%M} UTC"


def since_text(at: datetime | None, now: datetime) -> str:
    """Give "since 10:02:11 UTC (4 min)"; empty if the time is unknown."""
    return "" if at is None else f"since {time_text(at, now)} ({span_text(now - at)})"
