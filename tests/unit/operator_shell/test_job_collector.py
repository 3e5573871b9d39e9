"""The metrics of each job, as a scrape finds them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from elastipod_operator import clock, job_collector
from elastipod_operator.core.actions import JobSize
from elastipod_operator.core.phase_accounting import Phase
from elastipod_operator.core.record import Depth, PhaseTimes
from elastipod_operator.job_collector import JobCollector, JobFigures

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NOW = BEGAN + timedelta(seconds=60)
TIMES = PhaseTimes(
    "training", BEGAN, (("starting", 2_500), ("training", 40_000), ("draining", 1_500)), by_depth=(("memory", 1_500),)
)
TRAINS = JobFigures("team-a", "llm", JobSize(2, 4, 8), 3, TIMES, "Running", "Training", 13)


@pytest.fixture(autouse=True)
def minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrape comes a minute after the present phase began."""
    monkeypatch.setattr(clock, "now", lambda: NOW)


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
        'elastipod_job_phase_seconds{job="llm",namespace="team-a",phase="starting"}': 2.5,
        'elastipod_job_phase_seconds{job="llm",namespace="team-a",phase="training"}': 100,
        'elastipod_job_phase_seconds{job="llm",namespace="team-a",phase="draining"}': 1.5,
        'elastipod_job_change_seconds{depth="memory",job="llm",namespace="team-a"}': 1.5,
        'elastipod_job_state{job="llm",namespace="team-a",reason="Training",state="Running"}': 1,
        f"elastipod_job_step{labels}": 41,
        f"elastipod_job_steps_repeated_total{labels}": 13,
    }


def test_without_a_report_or_a_phase_there_is_no_sample_of_it() -> None:
    found = scraped({"u": replace(TRAINS, phase_times=PhaseTimes("ended"))}, {})
    assert {name.partition("{")[0] for name in found} == {
        "elastipod_job_replicas",
        "elastipod_job_target_replicas",
        "elastipod_job_max_replicas",
        "elastipod_job_restarts",
        "elastipod_job_state",
        "elastipod_job_steps_repeated_total",
    }


def test_a_job_has_a_bounded_number_of_series() -> None:
    """Also one whose record names phases and depths that this version does not know."""
    names = [*Phase, *(f"later-{n}" for n in range(50))]
    booked = tuple((str(name), 1_000) for name in names)
    by_depth = tuple((str(depth), 1) for depth in (*Depth, "later"))
    times = replace(TIMES, phase="later", booked=booked, by_depth=by_depth)
    found = scraped({"u": replace(TRAINS, phase_times=times)}, {"u": 1})
    assert len(found) == 5 + 1 + 1 + len(Phase) + len(Depth)
    assert found['elastipod_job_phase_seconds{job="llm",namespace="team-a",phase="unknown"}'] == 1 + 50 + 60


def test_jobs_beyond_the_limit_are_not_exported() -> None:
    jobs = {str(n): replace(TRAINS, name=f"job-{n}") for n in range(job_collector.MAX_EXPORTED_JOBS + 1)}
    found = [name for name in scraped(jobs, {}) if name.startswith("elastipod_job_restarts")]
    assert len(found) == job_collector.MAX_EXPORTED_JOBS
    assert not [name for name in found if f'"job-{job_collector.MAX_EXPORTED_JOBS}"' in name]


def test_finished_jobs_make_room_for_those_that_have_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_collector, "MAX_EXPORTED_JOBS", 3)
    states = ("Completed", "Running", "Failed", "Suspended", "Completed", "Faulted")
    jobs = {str(n): replace(TRAINS, name=f"job-{n}", state=state) for n, state in enumerate(states)}

    def exported() -> list[str]:
        found = [name for name in scraped(jobs, {}) if name.startswith("elastipod_job_restarts")]
        return [name.split('"')[1] for name in found]

    assert exported() == ["job-1", "job-3", "job-5"]
    del jobs["3"]
    assert exported() == ["job-1", "job-5", "job-0"]
