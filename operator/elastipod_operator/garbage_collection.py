"""Looking for garbage between decisions, not in the middle of them.

Python's collector looks for objects that refer to one another in circles whenever enough new ones are there, and nothing else
happens meanwhile: in a fleet of 10,000 pods in motion for 70 to 190 ms, every 5 to 15 s. So it is switched off, and called
when no decision is under way; what one look found alive is left out of the next ones, so that a look costs what is new. Once
an hour everything is looked at, for what died since it was left out. What is in no circle goes at once, as ever.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

WHOLE_EVERY_S = 3600.0
# New containers (dicts, lists, objects) that are worth a look: some 20 ms, and a few MiB if all of them were garbage.
ENOUGH = 20_000
NEW_EVERY_S = 0.25
# When decisions leave no gap for so long, one of them is held up.
PATIENCE_S = 2.0


@contextmanager
def collecting_by_hand() -> Iterator[None]:
    """Switch the collector off, and leave all that was imported by now out of what is looked at."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def look_for_garbage(gap: asyncio.Event) -> None:
    """Collect what is new whenever it is enough, and everything once an hour, until cancelled. gap: set between decisions."""
    whole_at = time.monotonic() + WHOLE_EVERY_S
    while True:
        await asyncio.sleep(NEW_EVERY_S)
        is_whole = time.monotonic() > whole_at
        if not is_whole and gc.get_count()[0] < ENOUGH:
            continue
        await _until(gap)
        if is_whole:
            gc.unfreeze()
            whole_at = time.monotonic() + WHOLE_EVERY_S
        gc.collect()
        gc.freeze()


async def _until(gap: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while not gap.is_set():  # the next decision may have begun before this goes on
                await gap.wait()
