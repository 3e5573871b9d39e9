"""Waits with a time limit: for an event, and for work that may block for ever."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

STORAGE_LIMIT_S = 10.0  # how long a look at files that may be on remote storage is waited for


async def set_within(event: asyncio.Event, limit_s: float | None) -> bool:
    """Wait until an event is set, at most this long (None: without limit); tells whether it is set.

    `asyncio.wait_for` is not used because before Python 3.12 it can swallow a cancellation that coincides with the time-out.
    """
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([waiting], timeout=limit_s)
    finally:
        waiting.cancel()
    return event.is_set()


async def in_thread(
    work: Callable[[], T], limit_s: float = STORAGE_LIMIT_S, *, discard: Callable[[T], object] = lambda _: None
) -> T:
    """Do work that storage may block for ever, and give its result. Raises what it raises, and TimeoutError after the limit.

    discard: gets a result that nobody waits for any more. The work has a thread of its own: the threads of the loop's executor could
    all be blocked, and the end of the loop waits for them. Where the pod can have no more threads, it is done at once.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T) -> None:
        if done.cancelled():
            discard(result)
        else:
            done.set_result(result)

    def fail(error: Exception) -> None:
        if not done.cancelled():
            done.set_exception(error)

    def run() -> None:
        with suppress(RuntimeError):  # the loop is closed
            try:
                result = work()
            except Exception as error:  # the caller gets it
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(settle, result)

    try:
        threading.Thread(target=run, name="storage", daemon=True).start()
    except RuntimeError:  # the limit of processes in a pod, which a fault may be about
        return work()
    try:
        await asyncio.wait([done], timeout=limit_s)
    finally:
        done.cancel()
    if done.cancelled():
        raise TimeoutError(errno.ETIMEDOUT, "its storage does not answer")
    return done.result()
