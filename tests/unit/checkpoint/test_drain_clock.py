"""How much time a drain has left does not depend on the node's clock, which may be set while the drain runs."""

from __future__ import annotations

import time

import pytest

from elastipod.checkpoint.drain import current_drain
from elastipod.worker_file import EventLevel, WorkerFile


@pytest.mark.parametrize("is_shortened", [False, True])
def test_a_step_of_the_clock_leaves_a_drain_its_time(
    page: WorkerFile, monkeypatch: pytest.MonkeyPatch, is_shortened: bool
) -> None:
    now, steady = time.time(), 500.0
    page.set_event(EventLevel.DRAIN, now + 1000.0, steady_deadline=steady + 1000.0)
    if is_shortened:
        page.set_deadline(now + 100.0, steady_deadline=steady + 100.0)
    monkeypatch.setattr("elastipod.checkpoint.drain.time.time", lambda: now + 3600.0)
    monkeypatch.setattr("elastipod.checkpoint.drain.time.monotonic", lambda: steady + 40.0)
    drain = current_drain()
    assert drain is not None
    assert drain.left_s == (60.0 if is_shortened else 960.0)


def test_an_agent_of_an_earlier_version_gives_the_time_of_day_alone(
    page: WorkerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elastipod.checkpoint.drain.time.time", lambda: 1000.0)
    page.set_event(EventLevel.DRAIN, 1180.0)
    drain = current_drain()
    assert drain is not None
    assert drain.left_s == 180.0
