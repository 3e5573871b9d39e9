"""Finds nodes that were deleted while the watch was broken: the next watch lists existing nodes and does not mention them.

A watch that resumes misses nothing. Otherwise it begins with a list, whose entries have no event type. After the list each
known node that neither it nor an event has shown is read. Without a missed deletion no call is made.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from .kube.api import CALL_ERRORS, ApiError
from .kube.store import Store

log = logging.getLogger(__name__)

# A list is complete when no entry has arrived for this time.
QUIET_S = 10.0
RETRY_S = 15.0


class MissedNodeDeletions:
    """Listens to the watch of nodes. read: reads a node as the API server has it now. wake: requests a pass for a job."""

    def __init__(
        self,
        store: Store,
        read: Callable[[str], Awaitable[object]],
        wake: Callable[[str], None],
        quiet_s: float = QUIET_S,
    ) -> None:
        self._store, self._read, self._wake = store, read, wake
        self._quiet_s = quiet_s
        self._shown: set[str] = set()
        """Since the newest list began."""
        self._is_listing = asyncio.Event()
        self._entry = asyncio.Event()

    def observe(self, name: str, *, is_listed: bool) -> None:
        """Record a node that the watch shows. is_listed: it is an entry of a list, not an event."""
        if is_listed:
            self._is_listing.set()
            self._entry.set()
        if self._is_listing.is_set():
            self._shown.add(name)

    async def run(self) -> None:
        """Check for deleted nodes after each list, until cancelled."""
        while True:
            await self._is_listing.wait()
            await self._end_of_list()
            missing = set(self._store.nodes) - self._shown
            self._is_listing.clear()
            self._shown.clear()
            for name in sorted(missing):
                await self._drop_if_gone(name)

    async def _end_of_list(self) -> None:
        with suppress(TimeoutError):
            while True:
                self._entry.clear()
                async with asyncio.timeout(self._quiet_s):
                    await self._entry.wait()

    async def _drop_if_gone(self, name: str) -> None:
        while name in self._store.nodes:
            try:
                await self._read(name)
            except CALL_ERRORS as error:
                if isinstance(error, ApiError) and error.status == 404:
                    log.info("node %s was deleted while the watch was broken", name)
                    for job in self._store.drop_node(name):
                        self._wake(job)
                elif isinstance(error, ApiError) and error.status < 500:
                    log.warning("cannot read node %s: %s", name, error)
                else:
                    await asyncio.sleep(RETRY_S)
                    continue
            return
