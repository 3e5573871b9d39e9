"""Waiting for an event with a limit."""

from __future__ import annotations

import asyncio


async def set_within(event: asyncio.Event, limit_s: float | None) -> bool:
    """Wait until an event is set, at most this long (None: for ever); tells whether it is.

    Not by `asyncio.wait_for`, which before Python 3.12 may swallow a cancellation that comes with the time-out.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=limit_s)
    finally:
        waiting.cancel()
    return event.is_set()
