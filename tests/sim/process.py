"""The operator's own coroutines in virtual time: they run as they are, with the clock and the event loop of a process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any, cast

from tests.sim.api_server import ApiFailure
from tests.sim.kernel import Kernel, Process, Script, Signal

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


class _Task(asyncio.Future[Any]):
    """What a coroutine gives that runs by itself."""


class _Loop:
    """As much of an event loop as the operator's queueing needs. run: plays a coroutine."""

    def __init__(
        self, kernel: Kernel, held_until: Callable[[], float], run: Callable[[Coroutine[Any, Any, Any]], Script]
    ) -> None:
        self._kernel = kernel
        self._held_until = held_until
        self._run = run
        self._tasks: list[Process] = []

    def get_debug(self) -> bool:
        return False

    def time(self) -> float:
        return self._kernel.now

    def call_soon(self, what: Callable[..., object], *arguments: object, context: object = None) -> None:
        self._kernel.after(0.0, lambda: what(*arguments))

    def call_later(self, seconds: float, what: Callable[..., object], *arguments: object) -> _Timer:
        timer = _Timer(self._kernel.now + seconds)

        def fire() -> None:
            if self._held_until() > self._kernel.now:
                self._kernel.at(self._held_until(), fire)
            elif not timer.is_cancelled:
                what(*arguments)

        self._kernel.after(seconds, fire)
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def create_task(self, coroutine: Coroutine[Any, Any, Any], **_: object) -> _Task:
        task = _Task(loop=cast(asyncio.AbstractEventLoop, self))

        def run() -> Script:
            try:
                yield 0.0
                given = yield from self._run(coroutine)
            except Exception as failure:
                task.set_exception(failure)
            else:
                task.set_result(given)
            finally:
                coroutine.close()

        self._tasks = [one for one in self._tasks if not one.done]
        self._tasks.append(self._kernel.spawn(run(), self._held_until))
        return task

    def end(self) -> None:
        """End all tasks where they wait."""
        for task in self._tasks:
            task.kill()


class OwnProcess:
    """The surroundings of the operator's coroutines. held_until: it stands still until then."""

    def __init__(self, kernel: Kernel, its_clock: SteadyClock, held_until: Callable[[], float]) -> None:
        self._clock = its_clock
        self._loop = _Loop(kernel, held_until, self.run)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Have the time of the process, and its loop, for code that does not wait."""
        before = clock.CLOCK
        clock.CLOCK = self._clock
        asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, self._loop))
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
                        asked = coroutine.throw(error) if error is not None else coroutine.send(answer)
                except StopIteration as end:
                    return end.value
                answer = error = None
                try:
                    answer = yield from asked.script if isinstance(asked, Wait) else _until_done(asked)
                except ApiFailure as failure:
                    error = ConnectionResetError(str(failure)) if not failure.status else failure
                except Exception as failure:
                    error = failure
        finally:
            coroutine.close()

    def end(self) -> None:
        """End what runs beside the coroutines that were waited for."""
        self._loop.end()


def _until_done(future: asyncio.Future[Any]) -> Script:
    """Wait for a future as a task does; what it holds the coroutine takes from it by itself."""
    future._asyncio_future_blocking = False
    if not future.done():
        signal = Signal()
        future.add_done_callback(lambda _: signal.fire())
        yield signal
