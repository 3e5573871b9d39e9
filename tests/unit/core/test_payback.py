"""What a job was seen to gain and to lose by resizes, and from when that counts."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from tests.unit.core.builders import NOW, job, observed, pod, policy, running, seconds, trains, transition

from elastipod_operator.core.health import assess
from elastipod_operator.core.payback import growth_hold, record_resize_pause, record_step_time
from elastipod_operator.core.quota_requests import increments_requested_from
from elastipod_operator.core.record import Record, ResizeStatistics, TransitionKind

FASTER = ResizeStatistics(seconds(10), ((2, seconds(2)), (4, seconds(1))))


def paced(record: Record, *paces: float | None) -> Record:
    pods = [(pod(n), running(step_pace=None if pace is None else seconds(pace))) for n, pace in enumerate(paces)]
    return record_step_time(record, assess(observed(job(record), pods)))


def test_the_pace_of_a_size_is_that_of_its_fastest_replica() -> None:
    assert paced(trains(3), 3.0, 2.0, None).resize_statistics.step_times == ((3, seconds(2)),)


def test_who_does_not_train_has_no_say_in_the_pace() -> None:
    assert paced(trains(2), 3.0, 2.0, 1.0).resize_statistics.step_times == ((2, seconds(2)),)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(trains(running_since=None), id="before all run"),
        pytest.param(trains(transition=transition()), id="while they are stopped"),
        pytest.param(trains(4), id="without any report"),
    ],
)
def test_no_pace_is_noted(record: Record) -> None:
    told = (2.0, 2.0) if len(record.members) == 2 else (None, None, None, None)
    assert paced(record, *told) is record


def test_the_newest_pace_of_each_of_four_sizes_is_kept() -> None:
    rows = tuple((size, seconds(size)) for size in (2, 3, 4, 5))
    again = paced(trains(3, resize_statistics=ResizeStatistics(seconds(7), rows)), 9.0, 9.0, 9.0)
    assert again.resize_statistics == ResizeStatistics(
        seconds(7), ((2, seconds(2)), (4, seconds(4)), (5, seconds(5)), (3, seconds(9)))
    )
    fifth = paced(trains(1, resize_statistics=ResizeStatistics(None, rows)), 9.0)
    assert [size for size, _ in fifth.resize_statistics.step_times] == [3, 4, 5, 1]


def test_the_pause_is_noted_when_the_workers_run_again() -> None:
    record = trains(resize_began_at=NOW - seconds(9), resize_statistics=FASTER)
    after = record_resize_pause(record, NOW)
    assert (after.resize_began_at, after.resize_statistics) == (None, ResizeStatistics(seconds(9), FASTER.step_times))
    plain = trains(resize_statistics=FASTER)
    assert record_resize_pause(plain, NOW) is plain


@pytest.mark.parametrize(
    ("changes", "since"),
    [
        pytest.param({}, NOW - seconds(50), id="since all run"),
        pytest.param({"resized_at": NOW - seconds(40)}, NOW - seconds(40), id="since the last resize"),
        pytest.param({"recovered_at": NOW - seconds(30)}, NOW - seconds(30), id="since the last recovery"),
        pytest.param({"resized_at": NOW - seconds(40), "recovered_at": NOW - seconds(45)}, NOW - seconds(40), id="whichever was later"),
        pytest.param({"running_since": None}, None, id="not before that"),
        pytest.param({"transition": transition(TransitionKind.RECOVERY)}, None, id="not in a change"),
    ],
)  # fmt: skip
def test_from_when_growth_is_put_off(changes: dict[str, Any], since: datetime | None) -> None:
    record = trains(**{"running_since": NOW - seconds(50), "resize_statistics": FASTER, **changes})
    assert growth_hold(record, policy()) == (None if since is None else since + seconds(10))


@pytest.mark.parametrize(
    ("paces", "hold_s"),
    [
        pytest.param(((2, 2.0), (3, 1.9), (4, 1.0)), 10, id="the largest size that was tried counts"),
        pytest.param(((1, 0.1), (2, 2.0), (4, 1.0)), 10, id="not a smaller one"),
        pytest.param(((2, 2.0), (4, 2.0)), 100, id="no gain: ten pauses"),
        pytest.param(((2, 2.0), (4, 0.0)), 100, id="a pace of nothing is no measure: ten pauses"),
    ],
)
def test_which_gain_counts(paces: tuple[tuple[int, float], ...], hold_s: float) -> None:
    rows = tuple((size, seconds(pace)) for size, pace in paces)
    record = trains(running_since=NOW, resize_statistics=ResizeStatistics(seconds(10), rows))
    assert growth_hold(record, policy()) == NOW + seconds(hold_s)


def test_no_increment_is_requested_before_the_last_resize_has_paid_off() -> None:
    record = trains(resized_at=NOW - seconds(1), resize_statistics=FASTER)
    hold = growth_hold(record, policy())
    assert hold is not None
    assert hold > NOW
    assert increments_requested_from(record, policy(), NOW) == hold
    assert increments_requested_from(record, policy(payback=False), NOW) is None
