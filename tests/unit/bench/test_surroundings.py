"""What a benchmark says of the machine while it runs: how much of it others used, and how fast it was."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from bench.common import surroundings as module
from bench.common.surroundings import NOISY, Surroundings


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares that others use, each looked at once; the last one stays."""
    shares = [0.0]
    monkeypatch.setattr(module, "describe", lambda: "a machine")
    monkeypatch.setattr(module, "busy_share", lambda seconds: shares.pop(0) if len(shares) > 1 else shares[0])
    return shares


def loops(monkeypatch: pytest.MonkeyPatch, *times_ms: float) -> None:
    told: Iterator[float] = iter(times_ms)
    monkeypatch.setattr(module, "_loop_ms", lambda: next(told))


def test_a_benchmark_that_is_interrupted_before_its_first_run_names_the_machine(
    seen: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    surroundings = Surroundings()
    surroundings.warn()
    assert (surroundings.describe(), capsys.readouterr().out) == ("a machine", "")


def test_one_run_has_one_figure_of_each_kind(seen: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    loops(monkeypatch, 71.0, 70.0, 75.0)
    surroundings = Surroundings()
    surroundings.await_quiet(0.0)
    assert surroundings.describe() == (
        "a machine; before a run others used 0.0% of it; a loop of a million additions took 70 ms"
    )


def test_several_runs_have_a_median_and_what_is_around_it(seen: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    loops(monkeypatch, *[50.0] * 3, *[160.0] * 3, *[70.0] * 3)
    surroundings = Surroundings()
    for share in (0.01, 0.2, 0.02):
        seen[:] = [share]
        surroundings.await_quiet(0.0)
    assert surroundings.describe() == (
        "a machine; before a run others used 2.0% of it, at most 20.0%; "
        "a loop of a million additions took 70 ms (50 to 160)"
    )


def test_a_run_waits_until_the_machine_is_quiet(seen: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    seen[:] = [1.0, 0.5, NOISY]
    surroundings = Surroundings()
    surroundings.await_quiet(60.0)
    surroundings.warn()
    assert seen == [NOISY]
    assert capsys.readouterr().out == ""


def test_it_does_not_wait_for_ever_and_says_so(seen: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    seen[:] = [1.0]
    surroundings = Surroundings()
    surroundings.await_quiet(0.0)
    surroundings.warn()
    assert "the machine was not quiet" in capsys.readouterr().out


def test_the_loop_is_timed_in_milliseconds_for_a_million(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((5.0, 5.03))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    assert module._loop_ms() == pytest.approx(100.0)  # 30 ms for 300,000
    assert re.fullmatch(r"[\d.]+", str(Surroundings().load_1m))
