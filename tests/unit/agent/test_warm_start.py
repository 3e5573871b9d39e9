"""When workers may be forked, what they run, and how long a server is waited for or replaced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.core.warm_start import (
    CODE,
    FILE,
    LOAD_LIMIT_S,
    LOSS_WINDOW_S,
    MODULE,
    QUIET_LIMIT_S,
    cold_start_reason,
    read_program,
    recent_losses,
    remaining_wait_s,
    replacement_delay_s,
)


@pytest.mark.parametrize(
    ("command", "kind", "target", "args"),
    [
        pytest.param(["python", "-u", "train.py", "--lr", "1"], FILE, "train.py", ("--lr", "1"), id="a script"),
        pytest.param(["python", "-u", "-m", "pkg.train", "-u"], MODULE, "pkg.train", ("-u",), id="a module"),
        pytest.param(["python", "-u", "-c", "import x", "a"], CODE, "import x", ("a",), id="code"),
        pytest.param(["python", "-u", "program"], FILE, "program", (), id="a folder"),
    ],
)
def test_a_command_is_taken_apart_as_python_does(
    command: list[str], kind: str, target: str, args: tuple[str, ...]
) -> None:
    program = read_program(command)
    assert program is not None
    assert (program.kind, program.target, program.args, program.command) == (kind, target, args, tuple(command))


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["/bin/echo"], id="no Python at all"),
        pytest.param(["python", "train.py", "a"], id="another shape"),
        pytest.param(["python", "-u", "train.pyc"], id="compiled"),
        pytest.param(["python", "-u", "-X", "dev", "train.py"], id="options"),
        pytest.param(["python", "-u", "-m"], id="nothing to run"),
    ],
)
def test_other_commands_are_left_to_an_exec(command: list[str]) -> None:
    assert read_program(command) is None


def test_runs_that_look_at_the_interpreter_itself_want_fresh_ones() -> None:
    assert cold_start_reason({"PATH": "/bin", "PYTHONTRACEMALLOC": ""}) is None
    assert cold_start_reason({"PYTHONTRACEMALLOC": "1"}) == "PYTHONTRACEMALLOC is set"


def test_pauses_grow_and_trying_ends() -> None:
    pauses = [replacement_delay_s(losses) for losses in range(1, 5)]
    assert pauses == [1.0, 4.0, None, None]


@pytest.mark.parametrize(
    ("lost_at", "now", "recent"),
    [
        pytest.param([], 0.0, [], id="none"),
        pytest.param([10.0, 20.0, 30.0], 30.0, [10.0, 20.0, 30.0], id="three within a minute"),
        pytest.param([0.0], LOSS_WINDOW_S - 0.5, [0.0], id="almost too old"),
        pytest.param([0.0], LOSS_WINDOW_S, [], id="too old"),
        pytest.param([0.0, 900.0, 4000.0], 4000.0, [900.0, 4000.0], id="only the old one is forgotten"),
    ],
)
def test_old_losses_are_forgotten(lost_at: list[float], now: float, recent: list[float]) -> None:
    assert recent_losses(lost_at, now) == recent


def test_trying_goes_on_over_weeks_but_not_within_an_hour() -> None:
    day_s = 24 * 3600.0
    assert [_delays_of_losses_every(each) for each in (day_s, LOSS_WINDOW_S)] == [[1.0] * 5, [1.0] * 5]
    assert _delays_of_losses_every(LOSS_WINDOW_S / 2) == [1.0, 4.0, 4.0, 4.0, 4.0], "the oldest is forgotten each time"
    assert _delays_of_losses_every(LOSS_WINDOW_S / 3) == [1.0, 4.0, None, None, None]


def _delays_of_losses_every(interval_s: float) -> list[float | None]:
    """Give the delay after each of five losses in a row."""
    lost_at: list[float] = []
    delays = []
    for number in range(5):
        lost_at = [*recent_losses(lost_at, number * interval_s), number * interval_s]
        delays.append(replacement_delay_s(len(lost_at)))
    return delays


@given(asked=st.floats(0, 1e6), late=st.floats(0, 1e3), heard=st.floats(0, 1e6))
def test_patience_is_bounded_and_outlasts_what_gets_on(asked: float, late: float, heard: float) -> None:
    left = remaining_wait_s(asked + late, asked, heard)
    assert left <= LOAD_LIMIT_S - late + 1e-6
    if late < LOAD_LIMIT_S and asked + late - heard < QUIET_LIMIT_S:
        assert left > 0
    if late > QUIET_LIMIT_S and heard <= asked:
        assert left <= 0
