"""Times as the API server writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def time_of(text: Any) -> datetime:
    """Read a time. Raises ValueError."""
    if isinstance(text, datetime):
        return text.astimezone(UTC)
    return datetime.fromisoformat(str(text).replace("Z", "+00:00"))


def time_or(text: Any, otherwise: datetime) -> datetime:
    """Read a time that somebody else may have written as he liked."""
    try:
        at = time_of(text) if text else otherwise
    except ValueError:
        at = otherwise
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
