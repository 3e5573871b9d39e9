"""Runs Python's cyclic garbage collector between reconcile passes.

Left alone, the collector stops the process at any time: with 10,000 changing pods for 70 to 190 ms, every 5 to 15 s. So it is
disabled, and called while no pass runs. Objects that survive a collection are frozen, so that the next one costs only what is
new. Once an hour a full collection finds the frozen objects that have died. Objects without cycles are freed at once as usual.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

FULL_EVERY_S = 3600.0
# Number of new containers (dicts, lists, objects) that justify a collection: some 20 ms, and a few MiB if all of them were garbage.
MIN_NEW_OBJECTS = 20_000
CHECK_EVERY_S = 0.25
# After this time without a gap between passes, a collection delays one.
MAX_WAIT_S = 2.0


@contextmanager
def manual_collection() -> Iterator[None]:
    """Disable automatic collection, and freeze all objects that exist now."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def collect_garbage(no_pass_running: asyncio.Event) -> None:
    """Collect new objects when there are enough, and all objects once an hour, until cancelled. no_pass_running: set between passes."""
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
            while not no_pass_running.is_set():  # the next decision may have begun meanwhile
                await no_pass_running.wait()
