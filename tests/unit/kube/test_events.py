"""Events beside the decisions: in order, each once, bounded, and an end in time."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from datetime import datetime
from typing import cast

import pytest
from prometheus_client import REGISTRY
from tests.unit.agents.fake_agent import until
from tests.unit.core.builders import job

from elastipod_operator.core.actions import JobEvent
from elastipod_operator.core.reasons import OpenReason
from elastipod_operator.core.record import Record
from elastipod_operator.core.snapshot import ObservedJob
from elastipod_operator.kube import events as module
from elastipod_operator.kube.api import Api, ApiError
from elastipod_operator.kube.events import Events

JOB = job(Record())


class Writer:
    """Notes what is written; each call waits until `go` is set. `fails`: reasons that are refused."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.written: list[str] = []
        self.fails: dict[str, Exception] = {}
        self.go = asyncio.Event()
        self.go.set()

    async def emit(self, fact: ObservedJob, event: JobEvent, at: datetime) -> None:
        self.begun.append(event.reason)
        await self.go.wait()
        if event.reason in self.fails:
            raise self.fails[event.reason]
        self.written.append(event.reason)


def notes(*reasons: str) -> list[JobEvent]:
    return [JobEvent(OpenReason(reason), "a test") for reason in reasons]


def dropped() -> float:
    return REGISTRY.get_sample_value("elastipod_api_writes_total", {"what": "event", "outcome": "dropped"}) or 0.0


async def test_those_of_one_job_keep_their_order_and_those_of_others_do_not_wait_for_them() -> None:
    writer = Writer()
    events = Events(cast(Api, writer))
    writer.go.clear()
    events.record(JOB, notes("a", "b"))
    others = [replace(JOB, uid=f"other-{n}") for n in range(50)]
    for n, other in enumerate(others):
        events.record(other, notes(f"other-{n}"))
    await until(lambda: len(writer.begun) == module.QUEUES)
    writer.go.set()
    events.record(JOB, notes("c"))
    await events.close()
    assert [reason for reason in writer.written if not reason.startswith("other")] == ["a", "b", "c"]
    assert len(writer.written) == 3 + len(others)


@pytest.mark.parametrize("error", [ApiError(403, "no"), TimeoutError(), ValueError("a fault of ours")])
async def test_one_that_cannot_be_written_is_told_and_keeps_the_others_from_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer()
    writer.fails["a"] = error
    events = Events(cast(Api, writer))
    events.record(JOB, notes("a", "b"))
    await events.close()
    assert writer.written == ["b"]
    assert [record.getMessage() for record in caplog.records if "could not be written" in record.getMessage()]


async def test_the_newest_are_left_out_while_too_many_wait_which_is_counted_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LIMIT", 2)
    before, writer = dropped(), Writer()
    events = Events(cast(Api, writer))
    writer.go.clear()
    events.record(JOB, notes("a", "b", "c", "d"))
    assert dropped() - before == 2
    assert len([r for r in caplog.records if "are dropped" in r.getMessage()]) == 1
    writer.go.set()
    await until(lambda: writer.written == ["a", "b"])
    events.record(JOB, notes("e"))
    await events.close()
    assert writer.written == ["a", "b", "e"]


async def test_the_end_waits_for_them_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.01)
    caplog.set_level(logging.WARNING)
    writer = Writer()
    events = Events(cast(Api, writer))
    writer.go.clear()
    events.record(JOB, notes("a", "b"))
    await events.close()
    assert (writer.begun, writer.written) == (["a"], [])
    assert "2 events were not written" in caplog.text
    events.record(JOB, notes("c"))
    writer.go.set()
    await events.close()
    assert writer.written == []
