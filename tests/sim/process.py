"""The operator's own coroutines in virtual time: they run as they are, with the clock and the event loop of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

from tests.sim.api_server import ApiFailure
from tests.sim.kernel import Kernel, Script, Signal

from elastipod_operator import clock
from elastipod_operator.clock import SteadyClock


class Wait(Awaitable[Any]):
    """What a coroutine waits for: a script, and what that gives or raises."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self)


class _Timer:
    def __init__(self, at: float) -> None:
        self._at = at
        self.is_cancelled = False

    def when(self) -> float:
        return self._at

    def cancel(self) -> None:
        self.is_cancelled = True


class _Future:
    """As much of a future as asyncio.sleep needs."""

    def __init__(self) -> None:
        self._signal, self._is_set = Signal(), False

    def cancelled(self) -> bool:
        return False

    def set_result(self, _: object) -> None:
        self._is_set = True
        self._signal.fire()

    def __await__(self) -> Generator[Any, Any, Any]:
        if not self._is_set:
            yield from Wait(self._until_fired()).__await__()

    def _until_fired(self) -> Script:
        yield self._signal


class _Loop:
    """As much of an event loop as the operator's queueing needs."""

    def __init__(self, kernel: Kernel, held_until: Callable[[], float]) -> None:
        self._kernel = kernel
        self._held_until = held_until

    def time(self) -> float:
        return self._kernel.now

    def call_later(self, seconds: float, what: Callable[..., object], *arguments: object) -> _Timer:
        timer = _Timer(self._kernel.now + seconds)

        def fire() -> None:
            if self._held_until() > self._kernel.now:
                self._kernel.at(self._held_until(), fire)
            elif not timer.is_cancelled:
                what(*arguments)

        self._kernel.after(seconds, fire)
        return timer

    def create_future(self) -> _Future:
        return _Future()


class OwnProcess:
    """The surroundings of the operator's coroutines. held_until: it stands still until then."""

    def __init__(self, kernel: Kernel, its_clock: SteadyClock, held_until: Callable[[], float]) -> None:
        self._clock = its_clock
        self._loop = cast(asyncio.AbstractEventLoop, _Loop(kernel, held_until))

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have the time of the process, and its loop, for code that does not wait."""
        before = clock.CLOCK
        clock.CLOCK = self._clock
        asyncio._set_running_loop(self._loop)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
            clock.CLOCK = before

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Script:
        """Run a coroutine; gives what it returns, raises what it raises. A call without an answer is an OSError for it."""
        answer: Any = None
        error: Exception | None = None
        try:
            while True:
                try:
                    with self.inside():
                        asked: Wait = coroutine.throw(error) if error is not None else coroutine.send(answer)
                except StopIteration as end:
                    return end.value
                answer = error = None
                try:
                    answer = yield from asked.script
                except ApiFailure as failure:
                    error = ConnectionResetError(str(failure)) if not failure.status else failure
                except Exception as failure:
                    error = failure
        finally:
            coroutine.close()
