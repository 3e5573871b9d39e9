"""Waits for an event with a time limit."""

from __future__ import annotations

import asyncio


async def set_within(event: asyncio.Event, limit_s: float | None) -> bool:
    """Wait until an event is set, at most this long (None: without limit); tells whether it is set.

    `asyncio.wait_for` is not used because before Python 3.12 it can swallow a cancellation that coincides with the time-out.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=limit_s)
    finally:
        waiting.cancel()
    return event.is_set()
