"""Garbage is looked for between decisions: in what is new when that is enough, and once in a while in everything."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest
from tests.unit.agents.fake_agent import until

from elastipod_operator import garbage_collection


class Thing:
    """Refers to itself, so that only the collector finds it when nobody else does."""

    def __init__(self) -> None:
        self.itself = self


@asynccontextmanager
async def looking() -> AsyncIterator[asyncio.Event]:
    no_pass_running = asyncio.Event()
    no_pass_running.set()
    with garbage_collection.manual_collection():
        task = asyncio.create_task(garbage_collection.collect_garbage(no_pass_running))
        try:
            yield no_pass_running
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "CHECK_EVERY_S", 0.001)


def lost_thing() -> weakref.ref[Thing]:
    return weakref.ref(Thing())


def is_gone(seen: weakref.ref[Thing]) -> bool:
    return seen() is None


async def test_nothing_is_looked_for_until_enough_is_new() -> None:
    async with looking():
        seen = lost_thing()
        await asyncio.sleep(0.05)
        assert seen() is not None
        new: list[list[int]] = [[] for _ in range(2 * garbage_collection.MIN_NEW_OBJECTS)]
        await until(lambda: seen() is None)
        assert len(new) == 2 * garbage_collection.MIN_NEW_OBJECTS
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


async def test_what_was_found_alive_is_looked_at_again_only_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "MIN_NEW_OBJECTS", 0)
    old = Thing()
    seen_old = weakref.ref(old)
    async with looking():
        for _ in range(2):  # the first look finds it alive, the second one leaves it out
            seen = lost_thing()
            await until(partial(is_gone, seen))
            old = None  # type: ignore[assignment]
        assert seen_old() is not None
    monkeypatch.setattr(garbage_collection, "FULL_EVERY_S", 0.001)
    async with looking():
        await until(lambda: seen_old() is None)


async def test_a_decision_is_not_held_up_unless_there_is_no_gap_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "MIN_NEW_OBJECTS", 0)
    async with looking() as no_pass_running:
        no_pass_running.clear()
        seen = lost_thing()
        await asyncio.sleep(0.05)
        assert seen() is not None
        no_pass_running.set()
        await until(lambda: seen() is None)
        no_pass_running.clear()
        monkeypatch.setattr(garbage_collection, "MAX_WAIT_S", 0.0)
        seen_after = lost_thing()
        await until(lambda: seen_after() is None)
