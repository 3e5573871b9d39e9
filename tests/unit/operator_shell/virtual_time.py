"""An event loop whose clock moves only when nothing is left to do, so that seconds pass at once and no machine is too slow.

For code that waits by asyncio alone: whoever waits for a socket or a process would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop that skips the time to the next timer."""

    _now = 1000.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:  # type: ignore[attr-defined]
            due = [timer.when() for timer in self._scheduled if not timer.cancelled()]  # type: ignore[attr-defined]
            assert due, "nothing is left that could end the wait"
            self._now = max(self._now, min(due))
        super()._run_once()  # type: ignore[misc]


def run_in_virtual_time(scenario: Coroutine[Any, Any, T]) -> T:
    """Run a scenario to its end."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)
