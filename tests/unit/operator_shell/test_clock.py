"""The operator's clock never jumps, whatever is done to the machine's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from elastipod_operator import clock
from elastipod_operator.clock import MAX_SLEW, SteadyClock
from elastipod_operator.pod_control import RetryBackoff
from elastipod_operator.queueing.workload_control import Retry

START = 1_750_000_000.0


class Machine:
    """The two clocks of a machine."""

    def __init__(self) -> None:
        self.wall, self.steady = START, 100.0
        self.clock = SteadyClock(wall=lambda: self.wall, steady=lambda: self.steady)

    def passes(self, seconds: float) -> float:
        """Let time pass; gives by how much the operator's clock moved."""
        before = self.clock.now()
        self.wall += seconds
        self.steady += seconds
        return (self.clock.now() - before).total_seconds()


def test_it_begins_with_the_time_of_the_machine_and_goes_with_it() -> None:
    machine = Machine()
    assert machine.clock.now() == datetime.fromtimestamp(START, UTC)
    assert machine.passes(12.5) == pytest.approx(12.5)


@pytest.mark.parametrize("jump_s", [-3600.0, -20.0, 20.0, 3600.0])
def test_a_jump_is_taken_over_little_by_little(jump_s: float) -> None:
    machine = Machine()
    machine.wall += jump_s
    assert machine.passes(0.0) == 0.0
    assert machine.passes(10.0) == pytest.approx(10.0 + (1.0 if jump_s > 0 else -1.0))
    for _ in range(int(abs(jump_s) / MAX_SLEW / 10.0) + 1):
        assert 8.99 <= machine.passes(10.0) <= 11.01
    assert machine.clock.now() == datetime.fromtimestamp(machine.wall, UTC)


def test_its_times_never_go_back() -> None:
    machine = Machine()
    machine.wall -= 86400.0
    times = [machine.passes(0.01) for _ in range(100)]
    assert min(times) > 0.0


@pytest.mark.parametrize(
    "made",
    [
        lambda: _of_pods(RetryBackoff()),
        lambda: _of_pods(RetryBackoff(), refused=True),
        lambda: _of_quota(Retry()),
    ],
    ids=["pods", "refused pods", "quota"],
)
@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_retry_is_due_when_its_timer_fires_though_the_clock_goes_slower_for_a_while(
    made: Callable[[], tuple[float, Callable[[], bool]]], jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timers go by the steady clock. What they wake for must not find that it is too early, as nothing wakes for it again."""
    machine = Machine()
    monkeypatch.setattr(clock, "CLOCK", machine.clock)
    machine.wall += jump_s
    wait_s, is_due = made()
    machine.passes(0.9 * wait_s)
    assert not is_due()
    machine.passes(0.1 * wait_s + 1e-6)
    assert is_due()


def _of_pods(backoff: RetryBackoff, *, refused: bool = False) -> tuple[float, Callable[[], bool]]:
    wait_s = backoff.note_refusal("forbidden", "job-uid") if refused else backoff.note_failure("job-uid")
    return wait_s, lambda: not backoff.is_active()


def _of_quota(retry: Retry) -> tuple[float, Callable[[], bool]]:
    return retry.note_failure(), retry.is_due
