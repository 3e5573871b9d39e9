"""Times as the API server writes them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ..core.record_codec import VALID_YEARS


def time_of(text: Any) -> datetime:
    """Read a time. Raises ValueError."""
    if isinstance(text, datetime):
        return text.astimezone(UTC)
    if not isinstance(text, str):
        raise ValueError("a time must be a string")
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def time_or(text: Any, otherwise: datetime) -> datetime:
    """Read a time from an untrusted source; gives `otherwise` if it is malformed or out of range."""
    try:
        at = time_of(text) if text else otherwise
    except (ValueError, OverflowError):
        at = otherwise
    if at is not otherwise and at.year not in VALID_YEARS:
        at = otherwise
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
