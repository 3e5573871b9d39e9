"""Metrics of each job by namespace and name, read when Prometheus scrapes, because a job that trains causes no passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from .core.actions import JobSize

# Jobs beyond it are counted in elastipod_jobs alone: each exported one costs seven time series.
MAX_EXPORTED_JOBS = 2000
_LABELS = ["namespace", "job"]


@dataclass(frozen=True, slots=True)
class JobFigures:
    """What the last pass found of a job. phase_since: when its present phase began; None once the job has ended."""

    namespace: str
    name: str
    size: JobSize
    restarts: int
    phase: str
    phase_since: datetime | None


class JobCollector(Collector):
    """Exports what `export` was last given; nothing before."""

    def __init__(self) -> None:
        self._figures: Mapping[str, JobFigures] = {}
        self._newest_step: Callable[[str], int | None] = lambda _uid: None

    def export(self, figures: Mapping[str, JobFigures], newest_step: Callable[[str], int | None]) -> None:
        """Export jobs by UID, the first ones of the mapping. newest_step: gives the newest step that workers of a job reported."""
        self._figures, self._newest_step = figures, newest_step

    def collect(self) -> Iterator[Metric]:
        """Give all samples of one scrape."""
        replicas = _gauge("replicas", "Replicas that train")
        target = _gauge(
            "target_replicas", "Replicas that the job trains with after the change in progress, if there is one"
        )
        maximum = _gauge("max_replicas", "Maximum size of the job")
        restarts = _gauge("restarts", "Recoveries of the job so far")
        phase = _gauge("phase_start_time_seconds", "When the present phase began, in seconds since 1970", "phase")
        step = _gauge("step", "Newest step that the job's workers reported")
        for uid, job in list(self._figures.items())[:MAX_EXPORTED_JOBS]:
            labels = [job.namespace, job.name]
            replicas.add_metric(labels, job.size.running)
            target.add_metric(labels, job.size.target)
            maximum.add_metric(labels, job.size.maximum)
            restarts.add_metric(labels, job.restarts)
            if job.phase_since is not None:
                phase.add_metric([*labels, job.phase], job.phase_since.timestamp())
            newest = self._newest_step(uid)
            if newest is not None:
                step.add_metric(labels, newest)
        yield from (replicas, target, maximum, restarts, phase, step)


def _gauge(name: str, description: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"elastipod_job_{name}", description, labels=[*_LABELS, *labels])
