"""When silence in the first step after a change of the generation is a hang, of workers whose processes live on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastipod_agent.core.hang import FIRST_STEP_S, FLOOR_S, Hang, HangDetector, Sample

EPOCH = 1_700_000_000.0


class Kept:
    """Workers that live over generations, seen by one detector. Each makes a step every step_s seconds unless it is stuck."""

    def __init__(self, timeout_s: float | None, *, step_s: float = 1.0, ranks: int = 2) -> None:
        self.detector = HangDetector(timeout_s)
        self.step_s = step_s
        self.now = 0.0
        self.samples = {rank: Sample(rank, 0, 0, EPOCH) for rank in range(ranks)}

    def change(self, after_s: float = 0.0) -> None:
        """Begin a generation: nobody has made a step in it."""
        self.now += after_s
        self.detector.begin_generation()
        self.samples = {rank: replace(each, has_reported=False) for rank, each in self.samples.items()}

    def go(self, seconds: float, *, stuck: tuple[int, ...] = (), is_in_checkpoint: bool = False) -> Hang | None:
        """Let time pass; gives the first hang that is found."""
        end = self.now + seconds
        while self.now < end:
            self.now += self.detector.poll_interval_s
            for rank, each in self.samples.items():
                if rank not in stuck and EPOCH + self.now >= each.time + self.step_s:
                    self.samples[rank] = Sample(rank, each.num_reports + 1, each.step + 1, EPOCH + self.now)
                self.samples[rank] = replace(self.samples[rank], is_in_checkpoint=is_in_checkpoint)
            reporting = [each for each in self.samples.values() if each.num_reports]
            if (found := self.detector.observe(self.now, reporting)) is not None:
                return found
        return None


@pytest.fixture
def kept() -> Kept:
    run = Kept(5.0)
    assert run.go(20) is None
    return run


def test_a_stated_limit_counts_from_the_start_of_the_generation(kept: Kept) -> None:
    kept.change(after_s=1000)
    assert kept.go(4.5, stuck=(1,)) is None
    found = kept.go(1, stuck=(1,))
    assert found is not None
    assert [(one.local_rank, one.has_reported) for one in found.silent] == [(1, False)]
    assert 5.0 <= found.silent[0].silent_s < 5.5
    assert found.limit_s == 5.0


def test_a_worker_that_may_wait_for_another_pod_is_judged_again_after_another_limit(kept: Kept) -> None:
    kept.change()
    found = kept.go(6, stuck=(0, 1))
    assert found is not None
    assert found.awaits_first_step
    kept.detector.excuse(found)
    assert kept.go(4, stuck=(0, 1)) is None
    again = kept.go(2, stuck=(0, 1))
    assert again is not None
    assert again.silent[0].silent_s >= 10, "it has been silent for as long as before"
    kept.detector.excuse(again)
    assert kept.go(20) is None, "it has only been late"
    after = kept.go(6, stuck=(0, 1))
    assert after is not None
    assert not after.awaits_first_step, "all have made a step"


def test_an_excuse_lasts_as_long_as_new_processes_may_take(kept: Kept) -> None:
    kept.change()
    waited_s = 0.0
    while (found := kept.go(6, stuck=(0, 1))) is not None and found.awaits_first_step:
        kept.detector.excuse(found)
        waited_s = found.silent[0].silent_s
    assert found is not None
    assert waited_s < FIRST_STEP_S <= found.silent[0].silent_s < FIRST_STEP_S + 6


def test_a_limit_that_is_longer_than_new_processes_may_take_is_no_excuse() -> None:
    run = Kept(2 * FIRST_STEP_S)
    run.go(20)
    run.change()
    assert run.go(1.9 * FIRST_STEP_S, stuck=(0, 1)) is None
    found = run.go(FIRST_STEP_S, stuck=(0, 1))
    assert found is not None
    assert not found.awaits_first_step


def test_a_worker_that_has_made_its_step_says_that_all_pods_have(kept: Kept) -> None:
    kept.change()
    assert kept.go(1.5, stuck=(1,)) is None
    found = kept.go(6, stuck=(0, 1))
    assert found is not None
    assert not found.awaits_first_step
    assert [(one.local_rank, one.has_reported) for one in found.silent] == [(0, True), (1, False)]


def test_without_a_stated_limit_the_pace_of_the_process_before_counts() -> None:
    quick, slow = Kept(None), Kept(None, step_s=100.0)
    for run, limit_s in ((quick, FLOOR_S), (slow, 1000.0)):
        assert run.go(2000) is None
        run.change()
        assert run.go(limit_s - 10, stuck=(0, 1)) is None
        found = run.go(20, stuck=(0, 1))
        assert found is not None
        assert found.limit_s == pytest.approx(limit_s, rel=0.02)
        assert found.awaits_first_step


def test_a_process_with_few_reports_is_judged_in_no_generation_without_a_stated_limit() -> None:
    run = Kept(None)
    assert run.go(4.4) is None
    run.change()
    assert run.go(10_000, stuck=(0, 1)) is None


def test_the_time_of_the_change_is_no_step() -> None:
    run = Kept(None)
    run.go(20)
    for _ in range(80):
        run.change(after_s=3000)
        assert run.go(1.4) is None
    assert run.go(20) is None
    found = run.go(FLOOR_S + 20, stuck=(0, 1))
    assert found is not None
    assert found.limit_s == FLOOR_S
    assert found.step_s == pytest.approx(1.0, abs=0.3)


def test_what_loads_a_checkpoint_in_its_first_step_is_not_silent(kept: Kept) -> None:
    kept.change()
    assert kept.go(100, stuck=(0, 1), is_in_checkpoint=True) is None
    assert kept.go(4.5, stuck=(0, 1)) is None
    assert kept.go(1.5, stuck=(0, 1)) is not None


def test_a_new_process_is_judged_from_its_own_first_report(kept: Kept) -> None:
    kept.change()
    kept.samples[1] = Sample(1, 0, 0, EPOCH + kept.now + 100)
    assert kept.go(100, stuck=(1,)) is None, "it imports and builds"
    assert kept.go(3) is None
    assert kept.go(4.5, stuck=(1,)) is None
    assert kept.go(1.5, stuck=(1,)) is not None


def test_a_new_process_that_reports_at_once_inherits_no_silence(kept: Kept) -> None:
    assert kept.go(4.5, stuck=(1,)) is None
    kept.samples[1] = Sample(1, 1, 20, EPOCH + kept.now)
    assert kept.go(4.5, stuck=(1,)) is None
    assert kept.go(1, stuck=(1,)) is not None
