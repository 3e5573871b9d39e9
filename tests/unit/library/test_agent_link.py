"""What a rank in memory learns from its agent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastipod.in_memory import agent_link
from elastipod.in_memory.agent_link import Fate, fate_after_stop, own_fate
from elastipod.local_worker import LocalWorker
from elastipod.worker_file import EventLevel, WorkerFile


@pytest.mark.parametrize(
    ("leaves", "kept", "fate"),
    [
        pytest.param(False, True, Fate.STAYS, id="the pod stays with its processes"),
        pytest.param(None, True, Fate.KEPT, id="processes are kept, and some of the pods stay"),
        pytest.param(True, True, Fate.LEAVES, id="the pod goes, although its processes live until then"),
        pytest.param(False, False, Fate.UNKNOWN, id="the pod stays, but its processes end"),
        pytest.param(None, False, Fate.UNKNOWN, id="processes end"),
        pytest.param(False, None, Fate.STAYS, id="an operator that says only that the pod stays"),
        pytest.param(None, None, Fate.UNKNOWN, id="an operator that says nothing"),
    ],
)
def test_a_rank_knows_what_becomes_of_its_state(leaves: bool | None, kept: bool | None, fate: Fate) -> None:
    assert fate_after_stop(leaves=leaves, kept=kept) is fate


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerFile:
    """The worker file of this process."""
    page = WorkerFile.create(str(tmp_path / "page"), 1)
    monkeypatch.setattr(agent_link, "local_worker", lambda: LocalWorker(page, 0))
    return page


def waits(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> list[float]:
    """Let time pass without waiting for it; gives the waits. then: happens in the third one."""
    found: list[float] = []

    def sleep(seconds: float) -> None:
        found.append(seconds)
        if len(found) == 3:
            then()

    monkeypatch.setattr("elastipod.in_memory.agent_link.time.sleep", sleep)
    monkeypatch.setattr("elastipod.in_memory.agent_link.time.monotonic", lambda: sum(found))
    return found


def test_a_rank_that_others_have_stopped_waits_for_its_own_stop(
    page: WorkerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = waits(monkeypatch, then=lambda: page.set_event(EventLevel.DRAIN, 1.0, leaves=True, kept=True))
    assert own_fate(lambda: False) is Fate.LEAVES
    assert len(found) == 3
    assert own_fate(lambda: False) is Fate.LEAVES
    assert len(found) == 3, "it is known now"


def test_it_waits_no_longer_than_the_generation_lasts_or_a_few_seconds(
    page: WorkerFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = waits(monkeypatch)
    assert own_fate(lambda: len(found) >= 2) is Fate.UNKNOWN
    assert len(found) == 2
    assert own_fate(lambda: False) is Fate.UNKNOWN
    assert agent_link.OWN_STOP_S <= sum(found) < agent_link.OWN_STOP_S + 1


def test_a_rank_without_an_agent_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_link, "local_worker", lambda: None)
    assert own_fate(lambda: False) is Fate.UNKNOWN
