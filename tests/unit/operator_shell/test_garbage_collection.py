"""Garbage is looked for between decisions: in what is new when that is enough, and once in a while in everything."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from tests.unit.agents.fake_agent import until

from elastipod_operator import garbage_collection


class Thing:
    """Refers to itself, so that only the collector finds it when nobody else does."""

    def __init__(self) -> None:
        self.itself = self


@asynccontextmanager
async def looking() -> AsyncIterator[asyncio.Event]:
    gap = asyncio.Event()
    gap.set()
    with garbage_collection.collecting_by_hand():
        task = asyncio.create_task(garbage_collection.look_for_garbage(gap))
        try:
            yield gap
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "NEW_EVERY_S", 0.001)


def lost_thing() -> weakref.ref[Thing]:
    return weakref.ref(Thing())


async def test_nothing_is_looked_for_until_enough_is_new() -> None:
    async with looking():
        seen = lost_thing()
        await asyncio.sleep(0.05)
        assert seen() is not None
        new: list[list[int]] = [[] for _ in range(2 * garbage_collection.ENOUGH)]
        await until(lambda: seen() is None)
        assert len(new) == 2 * garbage_collection.ENOUGH
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


async def test_what_was_found_alive_is_looked_at_again_only_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "ENOUGH", 0)
    old = Thing()
    seen_old = weakref.ref(old)
    async with looking():
        for _ in range(2):  # the first look finds it alive, the second one leaves it out
            seen = lost_thing()
            await until(lambda seen=seen: seen() is None)
            old = None  # type: ignore[assignment]
        assert seen_old() is not None
    monkeypatch.setattr(garbage_collection, "WHOLE_EVERY_S", 0.001)
    async with looking():
        await until(lambda: seen_old() is None)


async def test_a_decision_is_not_held_up_unless_there_is_no_gap_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "ENOUGH", 0)
    async with looking() as gap:
        gap.clear()
        seen = lost_thing()
        await asyncio.sleep(0.05)
        assert seen() is not None
        gap.set()
        await until(lambda: seen() is None)
        gap.clear()
        monkeypatch.setattr(garbage_collection, "PATIENCE_S", 0.0)
        seen_after = lost_thing()
        await until(lambda: seen_after() is None)
