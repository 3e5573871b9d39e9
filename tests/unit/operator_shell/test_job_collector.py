"""The metrics of each job, as a scrape finds them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, generate_latest

from elastipod_operator import job_collector
from elastipod_operator.core.actions import JobSize
from elastipod_operator.job_collector import JobCollector, JobFigures

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TRAINS = JobFigures("team-a", "llm", JobSize(2, 4, 8), 3, "training", BEGAN)


def scraped(jobs: dict[str, JobFigures], steps: dict[str, int]) -> dict[str, float]:
    """Give each sample of one scrape by its name and labels."""
    registry, collector = CollectorRegistry(), JobCollector()
    registry.register(collector)
    collector.export(jobs, steps.get)
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def test_a_job_that_trains() -> None:
    labels = '{job="llm",namespace="team-a"}'
    assert scraped({"u": TRAINS}, {"u": 41}) == {
        f"elastipod_job_replicas{labels}": 2,
        f"elastipod_job_target_replicas{labels}": 4,
        f"elastipod_job_max_replicas{labels}": 8,
        f"elastipod_job_restarts{labels}": 3,
        'elastipod_job_phase_start_time_seconds{job="llm",namespace="team-a",phase="training"}': BEGAN.timestamp(),
        f"elastipod_job_step{labels}": 41,
    }


def test_without_a_report_or_a_phase_there_is_no_sample_of_it() -> None:
    found = scraped({"u": replace(TRAINS, phase="ended", phase_since=None)}, {})
    assert {name.partition("{")[0] for name in found} == {
        "elastipod_job_replicas",
        "elastipod_job_target_replicas",
        "elastipod_job_max_replicas",
        "elastipod_job_restarts",
    }


def test_jobs_beyond_the_limit_are_not_exported() -> None:
    jobs = {str(n): replace(TRAINS, name=f"job-{n}") for n in range(job_collector.MAX_EXPORTED_JOBS + 1)}
    found = [name for name in scraped(jobs, {}) if name.startswith("elastipod_job_restarts")]
    assert len(found) == job_collector.MAX_EXPORTED_JOBS
    assert not [name for name in found if f'"job-{job_collector.MAX_EXPORTED_JOBS}"' in name]
