"""How long a phase is waited for, on a clock that only waiting moves, and how a process ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from elastipod.in_memory import phase_limit
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import Phase

LIMITS = {Phase.TRAINING: None, Phase.FILLING: timedelta(seconds=5), Phase.CONNECTING: timedelta(seconds=0.5)}
SENTENCE = "this rank has been connecting for more than 0.5 s; its process ends, so that another one can take its place"


class Changed:
    """Stands for the condition that the thread waits on: a wait lasts to its end, unless something happens first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.waits: list[float | None] = []
        self.notified = 0
        self.happens: list[Callable[[], object]] = []  # in the next waits

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def notify_all(self) -> None:
        self.notified += 1

    def wait(self, timeout: float | None) -> None:
        self.waits.append(timeout)
        assert timeout is not None or self.happens, "it would wait for ever"
        if self.happens:
            self._clock.now += 0.25
            self.happens.pop(0)()
        else:
            self._clock.now += timeout or 0


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


class Played:
    """A limit whose thread does not run by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        self.changed = Changed(self.clock)
        self.threads: list[dict[str, Any]] = []
        self.joined = 0
        monkeypatch.setattr(phase_limit, "LIMITS", LIMITS)
        monkeypatch.setattr(phase_limit, "time", self.clock)
        threading = SimpleNamespace(Condition=lambda: self.changed, Thread=self._thread)
        monkeypatch.setattr(phase_limit, "threading", threading)
        self.said: list[str] = []
        self.limit = PhaseLimit(self.said.append)

    def _thread(self, **options: Any) -> Any:
        def join() -> None:
            self.joined += 1

        return SimpleNamespace(start=lambda: self.threads.append(options), join=join)

    def watch(self, *happens: Callable[[], object]) -> list[float | None]:
        """Run what the thread runs, to its end; give its waits."""
        self.changed.happens = list(happens)
        self.threads[0]["target"]()
        return self.changed.waits


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def test_one_thread_that_does_not_hold_up_the_process_watches_all_phases(played: Played) -> None:
    played.limit.enter(Phase.TRAINING)
    assert played.threads == [], "nothing has a limit yet"
    played.limit.enter(Phase.FILLING)
    played.limit.enter(Phase.CONNECTING)
    played.limit.enter(Phase.TRAINING)
    assert [{**each, "name": ""} for each in played.threads] == [
        {"target": played.limit._watch, "name": "", "daemon": True}
    ]
    assert played.changed.notified == 4


def test_a_phase_ends_the_process_at_its_limit_and_not_before(played: Played) -> None:
    played.limit.enter(Phase.CONNECTING)
    assert played.watch() == [0.5]
    assert played.said == [SENTENCE]


def test_a_phase_at_its_very_limit_is_not_waited_for_once_more(played: Played) -> None:
    played.limit.enter(Phase.CONNECTING)
    played.clock.now += 0.5
    assert played.watch() == []
    assert played.said == [SENTENCE]


def test_each_phase_has_its_own_limit(played: Played) -> None:
    played.limit.enter(Phase.FILLING)
    waits = played.watch(lambda: played.limit.enter(Phase.TRAINING), lambda: played.limit.enter(Phase.CONNECTING))
    assert waits == [5.0, None, 0.5]
    assert played.said == [SENTENCE]


def test_progress_gives_the_whole_limit_again_and_is_none_where_there_is_no_limit(played: Played) -> None:
    played.limit.progress()
    played.limit.enter(Phase.FILLING)
    assert played.watch(played.limit.progress) == [5.0, 5.0]
    played.changed.waits.clear()
    played.limit.enter(Phase.TRAINING)
    played.limit.progress()
    assert played.watch(played.limit.close) == [None]


def test_a_pause_has_no_limit_and_the_phase_begins_anew_after_it(played: Played) -> None:
    played.limit.enter(Phase.FILLING)
    paused = played.limit.paused()
    waits = played.watch(paused.__enter__, lambda: paused.__exit__(None, None, None), played.limit.close)
    assert waits == [5.0, None, 5.0]
    assert played.said == []
    assert played.changed.notified == 3, "the end of a pause, as each other change"


def test_progress_of_another_thread_does_not_end_a_pause(played: Played) -> None:
    """Digests of a state that stands still are computed beside a rank that waits for a process that still starts."""
    played.limit.enter(Phase.CONNECTING)
    paused = played.limit.paused()
    waits = played.watch(
        paused.__enter__, played.limit.progress, played.changed.notify_all, lambda: paused.__exit__(None, None, None)
    )
    assert waits == [0.5, None, None, None, 0.5]
    assert played.said == [SENTENCE], "after the pause the limit runs"


def test_a_phase_that_begins_in_a_pause_has_no_limit_before_its_end(played: Played) -> None:
    played.limit.enter(Phase.TRAINING)
    with played.limit.paused():
        with played.limit.paused():
            played.limit.enter(Phase.CONNECTING)
        played.clock.now += 9
        waits = played.watch(played.limit.progress, played.limit.close)
    assert waits == [None, None]
    assert played.said == []


def test_a_pause_in_a_phase_without_a_limit_gives_it_none(played: Played) -> None:
    played.limit.enter(Phase.FILLING)
    played.limit.enter(Phase.TRAINING)
    with played.limit.paused():
        pass
    assert played.watch(played.limit.close) == [None]


def test_who_is_closed_has_ended_and_ends_nothing(played: Played) -> None:
    played.limit.enter(Phase.CONNECTING)
    played.clock.now += 9
    played.limit.close()
    assert played.joined == 1
    assert played.watch() == []
    assert played.said == []


def test_one_that_never_had_a_limit_is_closed_too(played: Played) -> None:
    played.limit.close()
    assert (played.joined, played.changed.notified) == (0, 1)


def test_a_process_ends_with_its_sentence_all_stacks_and_the_code_for_another_try() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.dup2(writing, 2)
            sys.stderr = sys.__stderr__  # pytest has put another in its place
            phase_limit.log.critical = lambda text: os.write(writing, f"{text}\n".encode())  # type: ignore[method-assign,assignment,misc]
            PhaseLimit()._on_expiry("too long")
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    assert text.startswith("too long\n")
    assert "(most recent call first)" in text
    assert "_end_process" in text
