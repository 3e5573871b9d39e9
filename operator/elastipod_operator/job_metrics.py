"""Metrics of all jobs together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from . import clock, metrics
from .core.actions import Plan
from .core.history import HistoryEntry
from .core.phase_accounting import Phase, goodput, phase_times_since
from .core.reasons import Reason
from .core.record import PhaseTimes, Record
from .core.snapshot import ObservedAgent, ObservedJob
from .job_collector import OTHER_REASON, JobFigures


class JobMetrics:
    """Jobs by state and phase, each job, and how their time was spent. newest_step: of a job, by its UID."""

    def __init__(self, newest_step: Callable[[str], int | None] = lambda _uid: None) -> None:
        self._states: dict[str, str] = {}
        self._ledgers: dict[str, PhaseTimes] = {}
        self._figures: dict[str, JobFigures] = {}
        self._awaited_gaps: dict[str, HistoryEntry] = {}
        """By UID of the job, the newest change that this process has decided, until its gap is known."""
        metrics.EACH_JOB.export(self._figures, newest_step)
        metrics.GOODPUT.set_function(self._goodput)
        metrics.export_leading()
        for name in metrics.STATES:
            metrics.JOBS.labels(name).set(0)

    def update(self, job: ObservedJob, todo: Plan, agents: Iterable[ObservedAgent] = ()) -> None:
        """Record the present state, phase and size of a job. agents: its own, of which one may know the gap of the newest change."""
        known = self._figures.get(job.uid)
        repeated = (known.steps_repeated if known else 0) + self._observe_gap(job.uid, agents)
        phase_times = todo.record.phase_times
        state = todo.conditions[-1]
        self._update_state(job.uid, state.type)
        self._update_phase(job.uid, phase_times)
        self._figures[job.uid] = JobFigures(
            job.namespace, job.name, todo.size, todo.record.restarts, phase_times, state.type,
            state.reason if isinstance(state.reason, Reason) else OTHER_REASON, repeated,
        )  # fmt: skip

    def forget(self, uid: str) -> None:
        """Drop a deleted job."""
        self._update_state(uid, None)
        self._update_phase(uid, PhaseTimes())
        if self._figures.pop(uid, None):
            metrics.LIFECYCLE.labels("deleted").inc()
        self._awaited_gaps.pop(uid, None)

    def record_written(self, uid: str, before: Record, todo: Plan) -> None:
        """Count what a written record of a job shows: its first one or its end, ended phases, new generations."""
        if before.is_empty and todo.record.generation == 0 and not todo.record.outcome:
            metrics.LIFECYCLE.labels("created").inc()
        if todo.record.outcome and not (
            before.is_empty or before.outcome
        ):  # an ended job may come from another operator
            metrics.LIFECYCLE.labels(todo.record.outcome.lower()).inc()
        for (phase, depth), spent in phase_times_since(before.phase_times, todo.record.phase_times).items():
            metrics.PHASE_SECONDS.labels(phase, depth).observe(spent.total_seconds())
        for entry in todo.history:
            metrics.GENERATIONS.labels(entry.kind.value).inc()
            if entry.depth is not None:
                metrics.CHANGES.labels(entry.kind.value, entry.depth.value, entry.depth_code.value).inc()
                self._awaited_gaps[uid] = entry

    def _observe_gap(self, uid: str, agents: Iterable[ObservedAgent]) -> int:
        """Observe the gap of a change once, and give the steps repeated. All who trained before and after it report about the same."""
        entry = self._awaited_gaps.get(uid)
        if entry is None or entry.depth is None:
            return 0
        for agent in agents:
            if agent.gap is not None and agent.generation == entry.generation:
                del self._awaited_gaps[uid]
                metrics.GAP_SECONDS.labels(entry.kind.value, entry.depth.value).observe(agent.gap.total_seconds())
                return agent.steps_repeated
        return 0

    def _update_state(self, uid: str, state: str | None) -> None:
        if self._states.get(uid) == state:
            return
        before = self._states.pop(uid, None)
        if before is not None:
            metrics.JOBS.labels(before).dec()
        if state is not None:
            self._states[uid] = state
            metrics.JOBS.labels(state).inc()

    def _update_phase(self, uid: str, phase_times: PhaseTimes) -> None:
        before = self._ledgers.pop(uid, PhaseTimes())
        if phase_times != PhaseTimes():
            self._ledgers[uid] = phase_times
        if before.phase != phase_times.phase:
            for phase, change in ((before.phase, -1), (phase_times.phase, 1)):
                if phase in tuple(Phase):
                    metrics.JOBS_IN_PHASE.labels(phase).inc(change)

    def _goodput(self) -> float:
        share = goodput(self._ledgers.values(), clock.now())
        return math.nan if share is None else share
