"""The earliest and the latest of optional times, and a time as the API server writes it."""

from __future__ import annotations

from datetime import UTC, datetime


def earliest(*times: datetime | None) -> datetime | None:
    """Give the earliest of the times that are set."""
    return min((t for t in times if t is not None), default=None)


def latest(*times: datetime | None) -> datetime | None:
    """Give the latest of the times that are set."""
    return max((t for t in times if t is not None), default=None)


def timestamp(at: datetime) -> str:
    """Write a time to the second, as Kubernetes does."""
    return at.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
