"""The earlier and the later of times that may not be set."""

from __future__ import annotations

from datetime import datetime


def earliest(*times: datetime | None) -> datetime | None:
    """Give the earliest of the times that are set."""
    return min((t for t in times if t is not None), default=None)


def latest(*times: datetime | None) -> datetime | None:
    """Give the time from which nothing stands in the way any more; None when nothing does."""
    return max((t for t in times if t is not None), default=None)
