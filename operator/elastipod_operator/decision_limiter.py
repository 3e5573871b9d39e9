"""Who decides when: jobs whose decisions take long leave most of the event loop to the others."""

from __future__ import annotations

import asyncio
from contextlib import suppress

# A decision that takes longer holds up every other job; one about a thousand pods takes some 20 ms.
SLOW_S = 0.05
# After a slow decision the others have so many times as long before the next slow one.
REST = 3


class Turns:
    """Lets one slow decision after another begin, with rests between them while other jobs have something to do.

    All jobs whose last decision was slow share these turns, in the order in which they come: together they take one part in
    four of the time, however many they are. The others never wait.
    """

    def __init__(self, gap: asyncio.Event) -> None:
        """gap: set while no decision is being made or carried out."""
        self._gap = gap
        self._in_turn = asyncio.Lock()
        self._rests_until = 0.0

    async def take(self, decision_s: float) -> None:
        """Wait until a job may decide. decision_s: how long its last decision took."""
        if decision_s < SLOW_S:
            return
        async with self._in_turn:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._rests_until):
                    await self._gap.wait()
            self._rests_until = asyncio.get_running_loop().time() + (1 + REST) * decision_s
