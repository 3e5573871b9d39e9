"""The time as it is stored and shown."""

from __future__ import annotations

from datetime import datetime, timezone


def utc_now() -> str:
    """Give the time as RFC 3339 with milliseconds, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
