"""Looking for garbage without holding decisions up.

Python's collector looks at everything that lives whenever a quarter of it is new, and nothing else happens meanwhile: of 10,000
pods for half a second. So what one such look found alive is not looked at again, but for once an hour. What refers to itself
and dies in between stays until then; all else goes at once as ever.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WHOLE_EVERY_S = 3600.0
OLDEST = 2


@contextmanager
def sparing_the_living() -> Iterator[None]:
    """Have each full collection look only at what is new since the one before; all that was imported by now is old."""
    gc.freeze()
    gc.callbacks.append(_freeze_survivors)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_survivors)
        gc.unfreeze()


async def look_everywhere() -> None:
    """Look for garbage in everything once an hour, until cancelled."""
    while True:
        await asyncio.sleep(WHOLE_EVERY_S)
        gc.unfreeze()
        gc.collect()


def _freeze_survivors(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == OLDEST:
        gc.freeze()
