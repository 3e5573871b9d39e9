"""Full collections look at what is new only, and once in a while at everything."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from tests.unit.agents.stand_in import until

from elastipod_operator import garbage


class Thing:
    """Refers to itself, so that only the collector finds it when nobody else does."""

    def __init__(self) -> None:
        self.itself = self


async def test_what_a_full_collection_found_alive_is_looked_at_again_only_with_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with garbage.sparing_the_living():
        old, young = Thing(), Thing()
        seen_old, seen_young = weakref.ref(old), weakref.ref(young)
        del young
        gc.collect()
        assert seen_young() is None
        del old
        gc.collect()
        assert seen_old() is not None
        monkeypatch.setattr(garbage, "WHOLE_EVERY_S", 0.001)
        looking = asyncio.create_task(garbage.look_everywhere())
        await until(lambda: seen_old() is None)
        looking.cancel()
    assert (gc.get_freeze_count(), garbage._freeze_survivors in gc.callbacks) == (0, False)
