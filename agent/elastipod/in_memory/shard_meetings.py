"""Ranks meet while each does its own part of a work that takes some much longer than others.

A rank that is done waits in a collective, whose time-out is short so that a peer that hangs is given up soon. One that only has more to
do joins that collective between two pieces of its work.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from elastipod.in_memory.memory_state import lost_world
from elastipod.in_memory.shard_exchange import any_raised

MEET_AFTER_S = 0.5  # a quarter of the shortest time-out of a regroup's collectives


class Meetings:
    """The meetings of one rank. All ranks have the same ones, in the same order; none waits for a message of another one meanwhile."""

    def __init__(self, progress: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """progress: restarts the limit of the phase."""
        self._progress, self._clock = progress, clock
        self._last = clock()

    def progress(self) -> None:
        """This rank has done a piece of its work, and has more of it. Collective now and then. Raises WorldLost."""
        self._progress()
        if self._clock() - self._last >= MEET_AFTER_S:
            self.meet(True)

    def finish(self) -> None:
        """Return once all ranks have called this. Collective. Raises WorldLost."""
        while self.meet(False):
            pass

    def meet(self, is_busy: bool) -> bool:
        """Tell whether any rank has more to do. Collective. Raises WorldLost."""
        with lost_world("the ranks could not wait for each other"):
            (is_any_busy,) = any_raised(is_busy)
        self._progress()
        self._last = self._clock()
        return is_any_busy
