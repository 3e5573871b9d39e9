"""Virtual time: things happen in the order of their times, and nothing waits for real."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Signal:
    """Something that processes wait for: they go on when it is fired, and wait anew if they wish."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def fire(self) -> None:
        """Let go on whoever waits now."""
        waiting, self.waiting = self.waiting, []
        for go_on in waiting:
            go_on()


Script = Generator[float | Signal, None, Any]
"""A process: yields the seconds that it waits, or what it waits for."""


class Process:
    """A running script; `kill` ends it where it waits. It does not go on before `held_until()`."""

    def __init__(self, kernel: Kernel, script: Script, held_until: Callable[[], float] | None = None) -> None:
        self._kernel = kernel
        self._script = script
        self._held_until = held_until
        self.done = False
        self._resume()

    def kill(self) -> None:
        """End it at the place where it waits."""
        if not self.done:
            self.done = True
            self._script.close()

    def _resume(self) -> None:
        if self.done:
            return
        if self._held_until is not None and self._held_until() > self._kernel.now:
            self._kernel.at(self._held_until(), self._resume)
            return
        try:
            delay = next(self._script)
        except StopIteration:
            self.done = True
            return
        if isinstance(delay, Signal):
            delay.waiting.append(lambda: self._kernel.after(0.0, self._resume))
        else:
            self._kernel.after(delay, self._resume)


class Kernel:
    """The clock and the queue of what is to come. Equal times keep the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def utc(self) -> datetime:
        """Give the true time."""
        return EPOCH + timedelta(seconds=self.now)

    def at(self, time: float, action: Callable[[], object]) -> None:
        """Have something done at a time, now at the earliest."""
        heapq.heappush(self._queue, (max(time, self.now), next(self._order), action))

    def after(self, delay: float, action: Callable[[], object]) -> None:
        """Have something done after some seconds."""
        self.at(self.now + delay, action)

    def spawn(self, script: Script, held_until: Callable[[], float] | None = None) -> Process:
        """Run a process from here on."""
        return Process(self, script, held_until)

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> bool:
        """Let time pass until a time or until `stop` holds; gives whether it held."""
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= until:
            self.now, _, action = pop(queue)
            action()
            if stop is not None and stop():
                return True
        self.now = max(self.now, until)
        return False


def format_time(time: datetime) -> str:
    """Write a time as Kubernetes does: whole seconds."""
    return time.isoformat(timespec="seconds").replace("+00:00", "Z")
