"""The earliest and the latest of optional times."""

from __future__ import annotations

from datetime import datetime


def earliest(*times: datetime | None) -> datetime | None:
    """Give the earliest of the times that are set."""
    return min((t for t in times if t is not None), default=None)


def latest(*times: datetime | None) -> datetime | None:
    """Give the latest of the times that are set."""
    return max((t for t in times if t is not None), default=None)
