"""Monitors of a generation's workers, besides their exits. Each may find that the run cannot continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault without an exit: the reason as /status shows it, and a message. culprits: local ranks that hold up the others."""

    reason: str
    message: str
    culprits: frozenset[int] = frozenset()


class Monitor(Protocol):
    """One monitor of one generation."""

    async def run(self) -> Finding:
        """Return when there is a finding. Cancelled when the generation ends; must clean up after itself."""


class Monitors:
    """Runs the monitors of one generation; ``on_finding`` is called with the first finding."""

    def __init__(self, on_finding: Callable[[Finding], None]) -> None:
        self._on_finding = on_finding
        self._tasks: list[asyncio.Task[Finding]] = []
        self._has_found = False

    def begin(self, monitors: Sequence[Monitor]) -> None:
        """Start the monitors."""
        for watch in monitors:
            task = asyncio.ensure_future(watch.run())
            task.add_done_callback(self._done)
            self._tasks.append(task)

    async def end(self) -> None:
        """Stop the monitors. Raises what a monitor failed with, which is an error of the agent."""
        for task in self._tasks:
            task.cancel()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    def _done(self, task: asyncio.Task[Finding]) -> None:
        if task.cancelled() or task.exception() is not None or self._has_found:
            return
        self._has_found = True
        self._on_finding(task.result())
