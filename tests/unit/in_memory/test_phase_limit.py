"""A phase that lasts too long ends the process; one that makes progress does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
from tests.patience import PATIENCE_S

from elastipod.in_memory import phase_limit
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import Phase

# FILLING_S is long enough for a thread that gets no processor for some seconds.
FILLING_S = 3.0
SHORT = {Phase.TRAINING: None, Phase.FILLING: timedelta(seconds=FILLING_S), Phase.CONNECTING: timedelta(seconds=0.05)}


class Ended:
    """Stands for the end of the process."""

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.sentence = ""

    def __call__(self, sentence: str) -> None:
        self.sentence = sentence
        self.happened.set()


@pytest.fixture
def ended() -> Ended:
    return Ended()


@pytest.fixture
def limit(ended: Ended, monkeypatch: pytest.MonkeyPatch) -> Iterator[PhaseLimit]:
    monkeypatch.setattr(phase_limit, "LIMITS", SHORT)
    made = PhaseLimit(ended)
    yield made
    made.close()


def test_a_phase_over_its_limit_ends_the_process_with_a_sentence(limit: PhaseLimit, ended: Ended) -> None:
    limit.enter(Phase.CONNECTING)
    assert ended.happened.wait(PATIENCE_S)
    assert "has been connecting for more than 0.05 s" in ended.sentence


def test_a_phase_without_a_limit_ends_nothing(limit: PhaseLimit, ended: Ended) -> None:
    limit.enter(Phase.FILLING)
    limit.enter(Phase.TRAINING)
    assert not ended.happened.wait(1.2 * FILLING_S)


def test_progress_begins_the_limit_anew(limit: PhaseLimit, ended: Ended) -> None:
    limit.enter(Phase.FILLING)
    for _ in range(5):
        assert not ended.happened.wait(FILLING_S / 4)
        limit.progress()
    assert ended.happened.wait(PATIENCE_S), "without progress it does end"
