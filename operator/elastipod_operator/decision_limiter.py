"""Limits slow decisions, so that jobs with many pods leave most of the event loop to other jobs."""

from __future__ import annotations

import asyncio
from contextlib import suppress

# A longer decision delays all other jobs; a decision about a thousand pods takes about 20 ms.
SLOW_S = 0.05
# After a slow decision, other jobs get this many times its duration before the next slow one.
IDLE_FACTOR = 3


class DecisionLimiter:
    """Starts slow decisions one at a time, with pauses between them while other jobs have something to do.

    All jobs whose last decision was slow share one queue. Together they take one part in four of the time. Other jobs never wait.
    """

    def __init__(self, no_pass_running: asyncio.Event) -> None:
        """no_pass_running: set while no reconcile pass runs."""
        self._no_pass_running = no_pass_running
        self._one_at_a_time = asyncio.Lock()
        self._idle_until = 0.0

    async def wait(self, decision_s: float) -> None:
        """Wait until a job may decide. decision_s: how long its last decision took."""
        if decision_s < SLOW_S:
            return
        async with self._one_at_a_time:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._idle_until):
                    await self._no_pass_running.wait()
            self._idle_until = asyncio.get_running_loop().time() + (1 + IDLE_FACTOR) * decision_s
