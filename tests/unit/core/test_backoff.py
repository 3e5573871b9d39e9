"""Waiting after what did not work: doubled, limited, and spread from job to job."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.unit.core.builders import seconds

from elastipod_operator.core.backoff import backoff, doubled, jitter, longest_wait

KEYS = [f"uid-{n}" for n in range(500)]
FOR_EVER = timedelta(days=10_000)


def waits(base: timedelta, limit: timedelta, tries: int) -> list[timedelta]:
    return sorted(backoff(base, limit, tries, key) for key in KEYS)


def test_the_shares_of_many_jobs_cover_everything_from_nothing_to_one() -> None:
    requests = sorted(jitter(key, 3) for key in KEYS)
    assert 0 <= requests[0] < 0.01
    assert 0.99 < requests[-1] < 1
    assert 0.4 < sum(requests) / len(requests) < 0.6


def test_a_share_depends_on_job_and_try_and_on_nothing_else() -> None:
    assert jitter("a", 1) == jitter("a", 1)
    assert len({jitter("a", 1), jitter("b", 1), jitter("a", 2), jitter("b", 2)}) == 4


@pytest.mark.parametrize(
    ("tries", "times"),
    [
        pytest.param(0, 1, id="none yet"),
        pytest.param(1, 1, id="the first"),
        pytest.param(2, 2, id="the second"),
        pytest.param(5, 16, id="the fifth"),
        pytest.param(17, 65_536, id="the seventeenth"),
        pytest.param(99, 65_536, id="no longer than that"),
    ],
)
def test_each_wait_is_twice_the_one_before_and_up_to_a_quarter_more(tries: int, times: int) -> None:
    spread = waits(seconds(10), FOR_EVER, tries)
    shortest = seconds(10) * times
    assert shortest <= spread[0] < shortest * 1.01
    assert shortest * 1.24 < spread[-1] < shortest * 1.25


@pytest.mark.parametrize("tries", [6, 7, 40])
def test_the_limit_is_spread_too(tries: int) -> None:
    spread = waits(seconds(10), seconds(300), tries)
    assert seconds(300) <= spread[0] < seconds(303)
    assert seconds(372) < spread[-1] < seconds(375)


def test_at_the_limit_each_try_waits_for_another_time() -> None:
    assert len({backoff(seconds(10), seconds(300), tries, "uid") for tries in range(6, 12)}) == 6


def test_below_the_limit_nothing_is_cut() -> None:
    assert waits(seconds(10), seconds(300), 5)[0] < seconds(162)


def test_waits_that_users_wish_for_are_never_too_long_to_be_counted() -> None:
    """The resource allows seconds in 31 bits: doubled sixteen times, they are more than a timedelta holds."""
    most = timedelta(seconds=2**31 - 1)
    for tries in (1, 2, 17, 99):
        assert backoff(most, most, tries, "a") <= longest_wait(most)
        assert doubled(most, most, tries) == most
