"""Calls to the API server that run in the background. Decisions know them and can cancel those that were not sent."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Mapping
from typing import Generic, TypeVar

from . import metrics

log = logging.getLogger(__name__)

K = TypeVar("K")
Call = Callable[[], Awaitable[None]]
OnIdle = Callable[[Mapping[K, Exception]], Awaitable[None]]

WRITE_PARALLEL = 16


class InFlight(Generic[K]):
    """The calls of one job, each identified by a key from its start until the results of all calls are settled.

    slots: limits the calls of all jobs; one job waits for at most WRITE_PARALLEL of them at a time, so that the few pods of one
    job do not wait for the thousands of another. settle: called with the failures once no call is left. Until then failed calls
    keep their keys, so that they are not started again before their back-off is known.

    stops: whether the failure of one call means that the others would fail too. With it the calls start slowly, as those of a
    ReplicaSet: one at first, and one more in parallel for each success. A failure that stops them ends the batch: waiting calls
    are not made, and all keys are kept until the failure is settled.
    """

    def __init__(
        self, slots: asyncio.Semaphore, settle: OnIdle[K], stops: Callable[[Exception], bool] | None = None
    ) -> None:
        self._slots = slots
        self._settle = settle
        self._stops = stops
        self._width = WRITE_PARALLEL if stops is None else 1
        self._skipped: set[K] = set()
        self.num_succeeded = 0
        """Number of successful calls since the last settlement."""
        self._is_stopped = False
        self._waiting: dict[K, Call] = {}
        self._sent: set[K] = set()
        self._unwanted: set[K] = set()
        self._failed: dict[K, Exception] = {}
        self._answered = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._runners: set[asyncio.Task[None]] = set()
        self._num_runners = 0
        self._is_settled = True

    def __contains__(self, key: K) -> bool:
        return key in self._waiting or key in self._sent or key in self._failed or key in self._skipped

    @property
    def is_idle(self) -> bool:
        """Whether the results of all calls are settled."""
        return self._idle.is_set()

    @property
    def num_skipped(self) -> int:
        """Number of calls that were not made because another one failed; until that is settled."""
        return len(self._skipped)

    async def wait_idle(self) -> None:
        """Wait until no call is left."""
        await self._idle.wait()

    def begin(self, calls: Mapping[K, Call]) -> None:
        """Begin calls, in their order. Their keys must be new."""
        if self._is_stopped:
            self._skipped.update(calls)
            return
        ordered_at = time.perf_counter()
        self._waiting.update({key: _timed(call, ordered_at) for key, call in calls.items()})
        self._is_settled &= not calls
        for _ in range(min(self._width - self._num_runners, len(calls))):
            self._add_runner()

    def _add_runner(self) -> None:
        self._num_runners += 1
        self._idle.clear()
        runner = asyncio.get_running_loop().create_task(self._run_calls())
        self._runners.add(runner)
        runner.add_done_callback(self._runners.discard)

    def keep_only(self, wanted: Container[K]) -> bool:
        """Cancel all other calls. False if some were already sent: the caller must then wait for them.

        Otherwise a decision would not know their results.
        """
        self._waiting = {key: call for key, call in self._waiting.items() if key in wanted}
        self._failed = {key: error for key, error in self._failed.items() if key in wanted}
        self._skipped = {key for key in self._skipped if key in wanted}
        self._unwanted = {key for key in self._sent if key not in wanted}
        return not self._unwanted

    async def wait_unwanted(self) -> None:
        """Wait for the unwanted calls that were sent already."""
        while self._unwanted & self._sent:
            self._answered.clear()
            await self._answered.wait()

    def cancel_waiting(self) -> None:
        """Cancel the calls that were not sent."""
        self._waiting.clear()

    async def close(self) -> None:
        """Cancel all calls."""
        self.cancel_waiting()
        runners = tuple(self._runners)
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)

    async def _run_calls(self) -> None:
        try:
            while self._waiting or (self._num_runners == 1 and not self._is_settled):
                await (self._make_one() if self._waiting else self._settle_all())
        finally:
            self._num_runners -= 1
            if not self._num_runners:
                self._width = WRITE_PARALLEL if self._stops is None else 1
                self._idle.set()

    async def _make_one(self) -> None:
        async with self._slots:
            if not self._waiting:
                return  # cancelled, or made by another runner
            key = next(iter(self._waiting))
            call = self._waiting.pop(key)
            self._sent.add(key)
            try:
                await call()
                self.num_succeeded += 1
                self._widen()
            except Exception as error:  # one failed call must not end the others; `settle` gets it
                self._failed[key] = error
                if self._stops is not None and self._stops(error):
                    self._stop()
            finally:
                self._sent.discard(key)
                self._answered.set()

    def _widen(self) -> None:
        """Allow one more parallel call, after one succeeded."""
        if self._width < WRITE_PARALLEL:
            self._width += 1
            if self._waiting and self._num_runners < self._width:
                self._add_runner()

    def _stop(self) -> None:
        """Make none of the waiting calls, because they would fail for the same reason."""
        self._is_stopped = True
        self._skipped.update(self._waiting)
        self._waiting.clear()

    async def _settle_all(self) -> None:
        self._is_settled = True
        failed = dict(self._failed)
        try:
            await self._settle(failed)
        except Exception:  # nothing awaits this task
            log.exception("the results of calls could not be handled")
        finally:
            for key in failed:
                self._failed.pop(key, None)
            self._skipped.clear()
            self._is_stopped = False
            self.num_succeeded = 0


def _timed(call: Call, ordered_at: float) -> Call:
    async def timed() -> None:
        try:
            await call()
        finally:
            metrics.POD_ORDER_SECONDS.observe(time.perf_counter() - ordered_at)

    return timed
