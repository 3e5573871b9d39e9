"""The gap between two generations, from the last step that local rank 0 reported to its first one after it, and the steps repeated."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from elastipod.worker_file import Progress

# A report has its own time, so the gap is exact unless a second one comes within a poll.
FIRST_POLL_S, LATER_POLL_S = 0.02, 0.5
SOON_S = 30.0


async def measure_gap(
    progress: Callable[[], Progress | None], last: Progress | None, on_first_step: Callable[[float, int], None]
) -> None:
    """Wait for the first report of a generation; give the gap in seconds, and how many steps had been made before.

    progress: gives the newest report of the generation. last: the last report of an earlier one; without it nothing is given.
    """
    soon = time.monotonic() + SOON_S
    while (first := progress()) is None:  # noqa: ASYNC110 a worker writes into shared memory, which wakes nobody
        await asyncio.sleep(FIRST_POLL_S if time.monotonic() < soon else LATER_POLL_S)
    if last is not None:
        on_first_step(max(0.0, first.time - last.time), max(0, last.step + 1 - first.step))
