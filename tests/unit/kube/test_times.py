"""Times that others wrote, with and without a zone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from elastipod_operator.kube.times import time_of, time_or

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
OTHERWISE = datetime(1, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        pytest.param("2026-01-01T12:00:00Z", NOON, id="as the API server writes it"),
        pytest.param("2026-01-01T14:00:00+02:00", NOON, id="of another zone"),
        pytest.param("2026-01-01T12:00:00", NOON, id="without a zone"),
        pytest.param(datetime(2026, 1, 1, 12, tzinfo=UTC), NOON, id="read already"),
        pytest.param("", OTHERWISE, id="nothing"),
        pytest.param(None, OTHERWISE, id="none"),
        pytest.param("noon", OTHERWISE, id="a word"),
        pytest.param(12, OTHERWISE, id="a number"),
        pytest.param("0001-01-01T00:00:00-05:00", OTHERWISE, id="a year that no zone can hold"),
        pytest.param("9999-12-31T23:59:59Z", OTHERWISE, id="the last year"),
    ],
)
def test_a_time_is_read_or_is_the_other_one(text: Any, read: datetime) -> None:
    found = time_or(text, OTHERWISE)
    assert found == read
    assert found.tzinfo is not None


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="a time must be a string"):
        time_of(12)
