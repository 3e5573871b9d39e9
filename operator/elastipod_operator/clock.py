"""The operator's clock: UTC that never jumps, even if the machine's clock is changed.

Silence, deadlines and windows are differences of its times. If the machine's clock were set forward, every agent would seem
silent at once; if it were set back, every wait would become longer. So corrections are applied gradually.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

# A correction of an hour is applied within ten hours; meanwhile durations are wrong by at most a tenth.
MAX_SLEW = 0.1
# A wait for a past time still yields to other tasks.
LEAST_WAIT_S = 0.01


class SteadyClock:
    """Follows `wall` (Unix seconds, may jump) at the pace of `steady` (seconds, never jumps).

    It starts at `wall`, and its times never go back.
    """

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self.steady = steady
        self._at = wall()
        self._read_at = steady()

    def now(self) -> datetime:
        """Give the time."""
        read_at = self.steady()
        passed_s = max(0.0, read_at - self._read_at)
        self._read_at = read_at
        self._at += passed_s
        limit_s = MAX_SLEW * passed_s
        self._at += min(limit_s, max(-limit_s, self._wall() - self._at))
        return datetime.fromtimestamp(self._at, UTC)


CLOCK = SteadyClock()


def now() -> datetime:
    """Give the time of this process's clock."""
    return CLOCK.now()


def steady() -> float:
    """Give seconds that never jump, for intervals."""
    return CLOCK.steady()


async def wait(event: asyncio.Event, until: datetime | None) -> None:
    """Wait for an event, or until a time of this clock if that is earlier; None waits for the event alone."""
    if until is None:
        await event.wait()
        return
    seconds = max((until - now()).total_seconds(), LEAST_WAIT_S)
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
