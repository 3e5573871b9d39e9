"""Exactly once, whatever becomes of the world: random jobs that are resized, drained and killed, judged by the audit."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.long_runs import LongRun
from tests.unit.library.simulated_job import Schedule

SCHEDULES = 200
LONG_SCHEDULES = 5000


def play(folder: Path, seeds: range) -> dict[str, int]:
    """Play the schedules of some seeds; each must be exact and complete. Gives what happened in all of them."""
    sums = {"schedules": len(seeds), "generations": 0, "kills": 0, "resizes": 0, "discarded": 0, "samples": 0}
    for seed in seeds:
        job = Schedule(folder / str(seed), seed)
        report = job.run()
        assert report.exact, f"seed {seed}: {report.sentence}"
        assert report.completed, f"seed {seed}"
        for name in ("generations", "kills", "resizes", "discarded"):
            sums[name] += getattr(job, name)
        sums["samples"] += report.samples_expected
    return sums


@pytest.mark.slow
def test_every_sample_counts_once_under_random_resizes_and_kills(tmp_path: Path, seed: int) -> None:
    sums = play(tmp_path, range(seed, seed + SCHEDULES))
    assert sums["kills"] > SCHEDULES / 4, "schedules without faults would prove little"
    assert sums["resizes"] > SCHEDULES
    assert sums["discarded"] > 1000, "what was prefetched and not trained is part of the question"


@pytest.mark.long("data")
@pytest.mark.timeout(1800)
def test_thousands_of_random_schedules_are_exact(tmp_path: Path, long_run: LongRun) -> None:
    long_run.count(**play(tmp_path, range(long_run.seed, long_run.seed + LONG_SCHEDULES)))
