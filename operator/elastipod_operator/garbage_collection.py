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

FULL_EVERY_S = 3600.0
# New containers (dicts, lists, objects) that are worth a look: some 20 ms, and a few MiB if all of them were garbage.
MIN_NEW_OBJECTS = 20_000
CHECK_EVERY_S = 0.25
# When decisions leave no gap for so long, one of them is held up.
MAX_WAIT_S = 2.0


@contextmanager
def manual_collection() -> Iterator[None]:
    """Switch the collector off, and leave all that was imported by now out of what is looked at."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def collect_garbage(no_pass_running: asyncio.Event) -> None:
    """Collect what is new whenever it is enough, and everything once an hour, until cancelled. no_pass_running: set between decisions."""
    full_at = time.monotonic() + FULL_EVERY_S
    while True:
        await asyncio.sleep(CHECK_EVERY_S)
        is_full = time.monotonic() > full_at
        if not is_full and gc.get_count()[0] < MIN_NEW_OBJECTS:
            continue
        await _until(no_pass_running)
        if is_full:
            gc.unfreeze()
            full_at = time.monotonic() + FULL_EVERY_S
        gc.collect()
        gc.freeze()


async def _until(no_pass_running: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(MAX_WAIT_S):
            while not no_pass_running.is_set():  # the next decision may have begun before this goes on
                await no_pass_running.wait()
