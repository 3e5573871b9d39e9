"""When silence is a hang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.core.hang import CHECKPOINT_S, FLOOR_S, Hang, HangDetector, Sample

EPOCH = 1_700_000_000.0


class Run:
    """Workers that make a step each so many seconds, seen by a detector that looks as it wants to."""

    def __init__(self, timeout_s: float | None = None, *, step_s: float = 1.0, ranks: int = 2) -> None:
        self.detector = HangDetector(timeout_s)
        self.step_s = step_s
        self.now = 0.0
        self.clock = EPOCH  # the workers'
        self.steps = dict.fromkeys(range(ranks), 0)
        self.reports = dict.fromkeys(range(ranks), 0)
        self.stands_at: dict[int, float] = {}

    def go(
        self,
        seconds: float,
        *,
        stuck: tuple[int, ...] = (),
        saving: tuple[int, ...] = (),
        looks: bool = True,
        **options: bool,
    ) -> Hang | None:
        """Let time pass; gives the first hang that is found. saving: who is inside a checkpoint call."""
        end = self.now + seconds
        while self.now < end:
            passed_s = self.detector.poll_interval_s if looks else end - self.now
            self.now += passed_s
            self.clock += passed_s
            for rank in set(self.steps) - set(stuck):
                num = int(self.now / self.step_s) - self.steps[rank]
                if num > 0:
                    self.steps[rank] += num
                    self.reports[rank] += num
                    self.stands_at[rank] = self.clock
            samples = [
                Sample(r, self.reports[r], s, self.stands_at[r], r in saving)
                for r, s in self.steps.items()
                if self.reports[r]
            ]
            found = self.detector.observe(self.now, samples, **options)
            if found is not None:
                return found
        return None


def test_a_rank_that_stops_among_others_is_found_after_the_floor() -> None:
    run = Run()
    assert run.go(100) is None
    found = run.go(FLOOR_S + 20, stuck=(1,))
    assert found is not None
    assert [(one.local_rank, one.step) for one in found.silent] == [(1, 100)]
    assert FLOOR_S <= found.silent[0].silent_s < FLOOR_S + 10
    assert found.limit_s == FLOOR_S
    assert found.step_s == pytest.approx(1.0)


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_a_save_that_takes_longer_than_the_limit_is_no_hang(timeout_s: float | None) -> None:
    run = Run(timeout_s)
    assert run.go(100) is None
    for _ in range(3):
        assert run.go(CHECKPOINT_S - 60, stuck=(0, 1), saving=(0, 1)) is None
        assert run.go(3) is None, "it makes steps again"
    assert run.go(60, stuck=(0, 1), saving=(0, 1)) is None
    found = run.go(FLOOR_S + 20, stuck=(0, 1))
    assert found is not None, "the save has ended, and nothing goes on"
    assert found.limit_s == (timeout_s or FLOOR_S)


def test_a_save_that_never_ends_is_a_hang() -> None:
    run = Run()
    assert run.go(100) is None
    found = run.go(2 * CHECKPOINT_S, stuck=(1,), saving=(1,))
    assert found is not None
    assert (found.limit_s, [one.local_rank for one in found.silent]) == (CHECKPOINT_S, [1])


def test_all_ranks_of_a_hang_are_named() -> None:
    run = Run(ranks=4)
    run.go(100)
    found = run.go(700, stuck=(0, 1, 2, 3))
    assert found is not None
    assert [one.local_rank for one in found.silent] == [0, 1, 2, 3]


def test_long_steps_have_ten_times_their_time() -> None:
    run = Run(step_s=100)
    assert run.go(3000) is None
    assert run.go(900, stuck=(0, 1)) is None
    found = run.go(200, stuck=(0, 1))
    assert found is not None
    assert found.limit_s == pytest.approx(1000, rel=0.1)


def test_rare_reports_of_quick_steps_are_no_hang() -> None:
    """A loop that reports every 200 s only, with a thousand steps at once."""
    run = Run(step_s=0.2)
    for _ in range(10):
        assert run.go(200, stuck=(0, 1)) is None
        assert run.go(run.detector.poll_interval_s) is None
    assert run.go(1500, stuck=(0, 1)) is None
    found = run.go(1000, stuck=(0, 1))
    assert found is not None
    assert found.limit_s > 1500
    assert found.step_s == pytest.approx(0.2, rel=0.1)


def test_a_worker_that_never_reports_and_one_with_few_reports_are_not_judged() -> None:
    run = Run(step_s=60)
    assert run.go(4 * 60 + 1) is None
    assert run.go(10_000, stuck=(0, 1)) is None
    silent = Run(ranks=1)
    assert silent.go(10_000, stuck=(0,)) is None


def test_a_report_of_the_same_step_is_life() -> None:
    run = Run()
    run.go(100)
    for _ in range(20):
        assert run.go(300, stuck=(0, 1)) is None
        run.reports = {rank: count + 1 for rank, count in run.reports.items()}
    assert run.go(700, stuck=(0, 1)) is not None


def test_a_frozen_agent_and_a_clock_that_was_set_fire_nothing() -> None:
    run = Run()
    run.go(100)
    run.now += 100_000
    assert run.go(10, stuck=(0, 1)) is None
    assert run.go(20) is None
    run.clock += 100_000
    assert run.go(20) is None
    run.clock -= 200_000
    assert run.go(300) is None
    assert run.go(500, stuck=(0, 1)) is None
    found = run.go(200, stuck=(0, 1))
    assert found is not None
    assert found.step_s == pytest.approx(1.0)


def test_nobody_is_judged_while_the_run_is_ending() -> None:
    run = Run()
    run.go(100)
    assert run.go(5000, stuck=(0, 1), is_ending=True) is None


def test_a_worker_that_ended_is_not_judged() -> None:
    run = Run()
    run.go(100)
    del run.steps[1]
    assert run.go(2000) is None


@pytest.mark.parametrize(("timeout_s", "poll_interval_s"), [(None, 0.5), (1.0, 0.1), (0.2, 0.05), (1000.0, 0.5)])
def test_looks_are_seldom_but_often_enough(timeout_s: float | None, poll_interval_s: float) -> None:
    assert HangDetector(timeout_s).poll_interval_s == poll_interval_s


def test_a_stated_time_is_taken_as_it_is_and_from_the_first_report_on() -> None:
    run = Run(2.0, step_s=0.5)
    run.go(0.6)
    assert run.go(1.5, stuck=(0, 1)) is None
    found = run.go(1.0, stuck=(0, 1))
    assert found is not None
    assert found.limit_s == 2.0


def test_silence_may_lack_what_the_caller_allows() -> None:
    run = Run(2.0, step_s=0.5)
    run.go(0.6)
    assert run.go(1.5, stuck=(0, 1)) is None
    samples = [Sample(rank, run.reports[rank], run.steps[rank], run.stands_at[rank]) for rank in (0, 1)]
    assert run.detector.observe(run.now, samples) is None
    assert run.detector.observe(run.now, samples, early_s=0.4) is None
    found = run.detector.observe(run.now, samples, early_s=0.8)
    assert found is not None
    assert [each.local_rank for each in found.silent] == [0, 1]


@given(
    st.lists(st.tuples(st.floats(0.01, 1e5), st.booleans(), st.integers(-5, 50)), max_size=60),
    st.sampled_from([None, 1.0, 50.0]),
)
def test_no_hang_without_silence_of_the_limit_whatever_comes(
    looks: list[tuple[float, bool, int]], timeout_s: float | None
) -> None:
    detector = HangDetector(timeout_s)
    now, reports, step, silent_since = 0.0, 0, 0, 0.0
    for passed_s, has_reported, steps in looks:
        now += passed_s
        if has_reported:
            reports, step, silent_since = reports + 1, step + steps, now
        found = detector.observe(now, [Sample(0, reports, step, now)] if reports else [])
        if found is not None:
            assert now - silent_since >= found.limit_s >= min(FLOOR_S, timeout_s or FLOOR_S)
