"""Work that may block for ever, beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.patience import PATIENCE_S

from elastipod_agent.waiting import in_thread


async def test_work_in_a_thread_gives_what_it_gives_or_raises() -> None:
    assert await in_thread(threading.current_thread, PATIENCE_S) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 / 0, PATIENCE_S)


async def test_work_that_blocks_is_given_up_and_what_it_gives_later_is_discarded() -> None:
    storage_is_back, discarded = threading.Event(), asyncio.Queue[bool]()
    with pytest.raises(TimeoutError, match="its storage does not answer"):
        await in_thread(lambda: storage_is_back.wait(PATIENCE_S), 0.01, discard=discarded.put_nowait)
    storage_is_back.set()
    assert await asyncio.wait_for(discarded.get(), PATIENCE_S) is True


async def test_work_whose_caller_is_cancelled_is_discarded_too() -> None:
    storage_is_back, discarded = threading.Event(), asyncio.Queue[bool]()
    task = asyncio.ensure_future(
        in_thread(lambda: storage_is_back.wait(PATIENCE_S), PATIENCE_S, discard=discarded.put_nowait)
    )
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    storage_is_back.set()
    assert await asyncio.wait_for(discarded.get(), PATIENCE_S) is True


async def test_without_another_thread_the_work_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is about the pod's limit of processes must be told like any other."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert await in_thread(threading.current_thread) is threading.current_thread()


def test_a_loop_that_has_ended_does_not_wait_for_blocked_work() -> None:
    storage_is_back = threading.Event()

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await in_thread(lambda: storage_is_back.wait(PATIENCE_S), 0.01)

    asyncio.run(give_up())
    storage_is_back.set()
