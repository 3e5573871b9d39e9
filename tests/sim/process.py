"""The operator's process in virtual time: an event loop that goes by the kernel's clock, on which its coroutines run as they are.

Tasks, events and time-outs are those of asyncio. What the process is in the middle of when it dies never goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any, cast

from tests.sim.api_objects import ApiFailure
from tests.sim.invariant_state import Violation
from tests.sim.kernel import Kernel, Process, Script
from tests.sim.operator_errors import raise_operator_errors

from elastipod_operator import clock
from elastipod_operator.clock import SteadyClock
from elastipod_operator.kube.api import CALL_ERRORS

# So many steps without a moment's rest are no work any more: the process would never let anything else happen.
MOST_STEPS = 50_000


class Wait(Awaitable[Any]):
    """What a coroutine waits for: a script, and what that gives or raises. A call without an answer is an OSError for it.

    is_watch: it may take any time, and nothing is held up by it.
    """

    def __init__(self, script: Script, *, is_watch: bool = False) -> None:
        self._script = script
        self._is_watch = is_watch

    def __await__(self) -> Generator[Any, Any, Any]:
        loop = cast(VirtualLoop, asyncio.get_running_loop())
        return loop.sim(self._script, is_watch=self._is_watch).__await__()


class _Step:
    """Something to be called soon, or at a time; one of `timers` until then, or until it is cancelled."""

    __slots__ = ("_at", "_timers", "arguments", "is_cancelled", "what")

    def __init__(
        self, what: Callable[..., object], arguments: tuple[object, ...], at: float, timers: set[_Step] | None = None
    ) -> None:
        self.what, self.arguments, self._at, self._timers = what, arguments, at, timers
        self.is_cancelled = False
        if timers is not None:
            timers.add(self)

    def when(self) -> float:
        return self._at

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._timers is not None:
            self._timers.discard(self)


class _Inside:
    """The time and the loop of a process, for as long as its code runs."""

    __slots__ = ("_before", "_clock", "_loop")

    def __init__(self, loop: VirtualLoop, its_clock: SteadyClock) -> None:
        self._loop, self._clock = loop, its_clock

    def __enter__(self) -> None:
        self._before, clock.CLOCK = clock.CLOCK, self._clock
        asyncio._set_running_loop(self._loop)

    def __exit__(self, *_: object) -> None:
        asyncio._set_running_loop(None)
        clock.CLOCK = self._before


class VirtualLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as tasks, futures, events and time-outs need. held_until: it stands still until then."""

    def __init__(self, kernel: Kernel, its_clock: SteadyClock, held_until: Callable[[], float]) -> None:
        self._kernel = kernel
        self._clock = its_clock
        self._held_until = held_until
        self._ready: deque[_Step] = deque()
        self._is_due = False
        self._is_over = False
        self._scripts: dict[asyncio.Future[Any], Process] = {}
        self._watches: set[asyncio.Future[Any]] = set()
        self._timers: set[_Step] = set()
        self.at_rest: Callable[[], None] = lambda: None
        """Called whenever it has nothing to do for now."""

    @property
    def is_busy(self) -> bool:
        """Whether something is to be done now, or a call is under way."""
        return bool(self._ready) or len(self._scripts) > len(self._watches)

    def will_call(self, what: Callable[..., object]) -> bool:
        """Whether there is a timer for something."""
        return what in [step.what for step in self._timers]

    def inside(self) -> _Inside:
        """Have the time of the process, and its loop, for code that does not wait."""
        return _Inside(self, self._clock)

    def sim(self, script: Script, *, is_watch: bool = False) -> asyncio.Future[Any]:
        """Let a script go on by itself; gives what it gives, once it is over. is_watch: that may be any time."""
        future = self.create_future()
        process = self._kernel.spawn(self._answer(script, future), self._held_until)
        if not process.done:
            self._scripts[future] = process
            if is_watch:
                self._watches.add(future)
        return future

    def _answer(self, script: Script, future: asyncio.Future[Any]) -> Script:
        answer: Any = None
        error: Exception | None = None
        try:
            answer = yield from script
        except ApiFailure as failure:
            error = failure if failure.status else ConnectionResetError(str(failure))
        except CALL_ERRORS as failure:
            error = failure
        self._scripts.pop(future, None)
        self._watches.discard(future)
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(answer)

    def end(self) -> None:
        """End everything where it is."""
        self._is_over = True
        for process in list(self._scripts.values()):
            process.kill()
        with self.inside():
            for task in asyncio.all_tasks(self):
                coroutine = task.get_coro()
                assert coroutine is not None
                with suppress(RuntimeError):  # one that would wait for something at its end, for ever
                    coroutine.close()
        self._ready.clear()

    def _go_on(self) -> None:
        self._is_due = False
        if self._held_until() > self._kernel.now:
            self._is_due = True
            self._kernel.at(self._held_until(), self._go_on)
            return
        steps, ready = 0, self._ready
        with self.inside():
            while ready and not self._is_over:
                step = ready.popleft()
                if not step.is_cancelled:
                    step.what(*step.arguments)
                steps += 1
                if steps > MOST_STEPS:
                    raise Violation("the operator is busy without end and lets nothing else happen")
        raise_operator_errors()
        if not self._is_over:
            self.at_rest()

    # -- what asyncio asks of a loop

    def get_debug(self) -> bool:
        return False

    def time(self) -> float:
        return self._kernel.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # gives no Handle
        step = _Step(callback, args, self._kernel.now)
        self._ready.append(step)
        if not self._is_due and not self._is_over:
            self._is_due = True
            self._kernel.after(0.0, self._go_on)
        return step

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # gives no Handle
        return self.call_at(self._kernel.now + delay, callback, *args)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:  # type: ignore[override]  # gives no Handle
        step = _Step(callback, args, when, self._timers)

        def ring() -> None:
            self._timers.discard(step)
            if not step.is_cancelled and not self._is_over:
                self._ready.append(step)
                if not self._is_due:
                    self._is_due = True
                    self._go_on()

        self._kernel.at(when, ring)
        return step

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any], *, name: Any = None, context: Any = None
    ) -> Any:
        return asyncio.Task(coro, loop=self, name=name)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Take what nobody else took: an error that came of a task which nobody waits for."""
        error = context.get("exception")
        if not self._is_over and isinstance(error, Exception) and not isinstance(error, CALL_ERRORS):
            raise_later = Violation(f"{context.get('message')}: {type(error).__name__}: {error}")
            self._kernel.at(self._kernel.now, lambda: raise_now(raise_later))


def raise_now(error: Exception) -> None:
    raise error
