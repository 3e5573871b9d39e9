"""Metrics of each job by namespace and name, read when Prometheus scrapes, because a job that trains causes no passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from . import clock
from .core.actions import JobSize
from .core.phase_accounting import PHASES, total, total_by_depth
from .core.record import PhaseTimes

# Jobs beyond it are counted in elastipod_jobs alone: each exported one costs at most 25 time series, as phases and depths are few.
MAX_EXPORTED_JOBS = 2000
_ENDS = ("Completed", "Failed")
# What is exported for a reason that is not the operator's own, such as one of Kueue: labels stay few.
OTHER_REASON = "Other"
_LABELS = ["namespace", "job"]


@dataclass(frozen=True, slots=True)
class JobFigures:
    """What the last pass found of a job. state, reason: of its last condition. steps_repeated: since this operator leads."""

    namespace: str
    name: str
    size: JobSize
    restarts: int
    phase_times: PhaseTimes
    state: str
    reason: str
    steps_repeated: int = 0


class JobCollector(Collector):
    """Exports what `export` was last given; nothing before."""

    def __init__(self) -> None:
        self._figures: Mapping[str, JobFigures] = {}
        self._newest_step: Callable[[str], int | None] = lambda _uid: None

    def export(self, figures: Mapping[str, JobFigures], newest_step: Callable[[str], int | None]) -> None:
        """Export jobs by UID: those that have not ended come before the others.

        newest_step: gives the newest step that workers of a job reported.
        """
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
        spent = _gauge("phase_seconds", "Time that the job spent in each phase so far", "phase")
        changes = _gauge(
            "change_seconds", "Time that resizes and recoveries of each depth took, until new steps were made", "depth"
        )
        state = _gauge("state", "1 for the last condition of the job", "state", "reason")
        step = _gauge("step", "Newest step that the job's workers reported")
        text = "Steps that resizes and recoveries since this operator leads have cost, as they had been made before"
        repeated = CounterMetricFamily("elastipod_job_steps_repeated", text, labels=_LABELS)
        now = clock.now()
        # Ended jobs may stay for ever, and nobody waits for news of them.
        unfinished_first = sorted(self._figures.items(), key=lambda one: one[1].state in _ENDS)
        for uid, job in unfinished_first[:MAX_EXPORTED_JOBS]:
            labels = [job.namespace, job.name]
            replicas.add_metric(labels, job.size.running)
            target.add_metric(labels, job.size.target)
            maximum.add_metric(labels, job.size.maximum)
            restarts.add_metric(labels, job.restarts)
            repeated.add_metric(labels, job.steps_repeated)
            state.add_metric([*labels, job.state, job.reason], 1)
            times = job.phase_times
            if times.since is not None and times.phase in PHASES:
                phase.add_metric([*labels, times.phase], times.since.timestamp())
            for name, time in total(times, now).items():
                spent.add_metric([*labels, name], time.total_seconds())
            for depth, time in total_by_depth(times, now).items():
                changes.add_metric([*labels, depth], time.total_seconds())
            newest = self._newest_step(uid)
            if newest is not None:
                step.add_metric(labels, newest)
        yield from (replicas, target, maximum, restarts, phase, spent, changes, state, step, repeated)


def _gauge(name: str, description: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"elastipod_job_{name}", description, labels=[*_LABELS, *labels])
