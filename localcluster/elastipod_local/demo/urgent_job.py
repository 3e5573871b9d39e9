"""The report of the demo's second act: an urgent job arrives in the elastic job's queue and completes.

As in `report`, everything is a pure function of the records, and times count from the elastic job's creation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from elastipod_local.demo.report import (
    FORCED_CAUSE,
    Change,
    JobPhase,
    Json,
    Kind,
    Run,
    Span,
    changes,
    losses,
    resize_json,
)
from elastipod_local.demo.run_log import Step
from elastipod_local.demo.watcher import JobEvent

PREEMPTED = "Preempted"  # as Kueue names it, and the operator after it


@dataclass(frozen=True, slots=True)
class UrgentRun:
    """The urgent job. run: its own, which begins when it was applied; state: its last condition.

    audit and audit_exit: what `elastipod audit --json` found in its sample logs. events: those of the elastic job
    and its Workloads.
    """

    job: str
    run: Run
    state: str
    audit: Mapping[str, Any] = field(default_factory=dict)
    audit_exit: int = 0
    events: Sequence[JobEvent] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step that it made, in order."""
        return _steps(self.run)


def _steps(run: Run) -> tuple[Step, ...]:
    return tuple(step for generation in run.generations for step in generation.steps)


def queue_report(run: Run, urgent: UrgentRun) -> Json:
    """Give the report of the second act; a part that did not happen is None. run: the elastic job's."""
    shrink, growth = given_up(run, urgent), grown_back(run, urgent)
    return {
        "newcomer": _urgent_job(run, urgent),
        "given_up": _given_up(run, urgent, shrink) if shrink else None,
        "meanwhile": _meanwhile(run, urgent),
        "grown_back": _grown_back(urgent, growth) if growth else None,
    }


def given_up(run: Run, urgent: UrgentRun) -> Change | None:
    """Give the first shrink that began after the urgent job's arrival."""
    found = (c for c in _resizes_since(run, urgent.run.created_at) if c.entry.size < c.entry.size_before)
    return next(found, None)


def grown_back(run: Run, urgent: UrgentRun) -> Change | None:
    """Give the first growth after that shrink."""
    shrink = given_up(run, urgent)
    if shrink is None:
        return None
    found = (c for c in _resizes_since(run, shrink.entry.at) if c.entry.size > c.entry.size_before)
    return next(found, None)


def _resizes_since(run: Run, moment: float) -> list[Change]:
    resizes = [c for c in changes(run) if c.entry.kind is Kind.RESIZE and c.entry.cause != FORCED_CAUSE]
    return [c for c in resizes if c.entry.began_at >= moment]


def urgent_spans(run: Run, urgent: UrgentRun) -> tuple[Span, ...]:
    """Give the phases in which the urgent job trained."""
    sizes = {entry.generation: entry.size for entry in urgent.run.history}
    return tuple(
        Span(
            JobPhase.TRAINING,
            run.since_creation(generation.steps[0].at),
            run.since_creation(generation.steps[-1].at),
            sizes.get(generation.number, generation.world_size),
        )
        for generation in urgent.run.generations
        if generation.steps
    )


def urgent_losses(run: Run, urgent: UrgentRun) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Give (seconds, loss) of every step of the urgent job that reported one, one tuple for each generation."""
    later = urgent.run.created_at - run.created_at
    return tuple(tuple((round(at_s + later, 3), loss) for at_s, _, loss in curve) for curve in losses(urgent.run))


def _urgent_job(run: Run, urgent: UrgentRun) -> Json:
    """quota_after_s: from its arrival until Kueue had granted its quota."""
    steps = urgent.steps
    spans = urgent_spans(run, urgent)
    return {
        "job": urgent.job,
        "state": urgent.state,
        "replicas": spans[0].size if spans else None,
        "arrived_s": run.since_creation(urgent.run.created_at),
        "quota_after_s": urgent.run.since_creation(urgent.run.history[0].began_at) if urgent.run.history else None,
        "first_step_s": run.since_creation(steps[0].at) if steps else None,
        "last_step_s": run.since_creation(steps[-1].at) if steps else None,
        "steps": len(steps),
        **{name: urgent.audit.get(name) for name in ("samples_total", "samples_unique", "samples_expected")},
        "audit_exit": urgent.audit_exit,
        "audit": dict(urgent.audit),
    }


def _given_up(run: Run, urgent: UrgentRun, change: Change) -> Json:
    """kueue_said: Kueue's reason for the eviction; quoted: whether an Event of the job repeats it."""
    before = [g.steps[-1].at for g in run.generations if g.number < change.entry.generation and g.steps]
    reason = next((event.message for event in reversed(urgent.events) if _is_eviction(event)), "")
    return {
        **resize_json(change),
        "asked_s": run.since_creation(change.entry.began_at),
        "last_step_s": run.since_creation(before[-1]),
        "kueue_said": reason,
        "quoted": bool(reason) and any(reason in event.message for event in urgent.events if event.kind != "Workload"),
    }


def _is_eviction(event: JobEvent) -> bool:
    return event.kind == "Workload" and event.reason == f"EvictedDueTo{PREEMPTED}"


def _meanwhile(run: Run, urgent: UrgentRun) -> Json:
    """What the elastic job did while the urgent job trained; longest_pause_s: without a step, from its arrival on."""
    if not urgent.steps:
        return {"steps": 0, "sizes": [], "longest_pause_s": None, "recoveries": 0}
    first, last = urgent.steps[0].at, urgent.steps[-1].at
    made = [step.at for step in _steps(run)]
    trained = {g.number for g in run.generations if any(first <= step.at <= last for step in g.steps)}
    pauses = [after - before for before, after in pairwise(made) if after >= urgent.run.created_at and before <= last]
    return {
        "steps": sum(first <= at <= last for at in made),
        "sizes": [size for size, _ in groupby(entry.size for entry in run.history if entry.generation in trained)],
        "longest_pause_s": round(max(pauses), 3) if pauses else None,
        "recoveries": sum(
            entry.kind is Kind.RECOVERY and urgent.run.created_at <= entry.began_at <= last for entry in run.history
        ),
    }


def _grown_back(urgent: UrgentRun, change: Change) -> Json:
    """after_s: from the urgent job's last step to the decision to grow."""
    last = urgent.steps[-1].at if urgent.steps else urgent.run.created_at
    return {**resize_json(change), "after_s": round(change.entry.began_at - last, 3)}


def queue_shortcomings(report: Mapping[str, Any]) -> list[str]:
    """Say in sentences what the second act should have shown but did not; empty if everything was shown."""
    urgent, shrink = report["newcomer"], report["given_up"]
    meanwhile, growth = report["meanwhile"], report["grown_back"]
    problems = _urgent_job_problems(urgent)
    if shrink is None:
        problems.append(f"the elastic job gave up no replicas after {urgent['job']} had arrived")
        return problems
    problems += _shrink_problems(shrink)
    if urgent["steps"]:
        problems += _meanwhile_problems(urgent, meanwhile, shrink)
    if growth is None:
        problems.append(f"the elastic job did not grow back after {urgent['job']}")
    return problems


def _urgent_job_problems(urgent: Mapping[str, Any]) -> list[str]:
    problems = []
    if urgent["state"] != "Completed":
        problems.append(f"{urgent['job']} ended as {urgent['state']}, not Completed")
    if not urgent["steps"]:
        problems.append(f"{urgent['job']} made no step")
    if urgent["audit_exit"] != 0:
        problems.append(
            f"the audit found that {urgent['job']} did not train its samples exactly once: {urgent['audit']}"
        )
    return problems


def _shrink_problems(shrink: Mapping[str, Any]) -> list[str]:
    problems = []
    if shrink["cause"] != PREEMPTED:
        problems.append(f"the elastic job shrank because of {shrink['cause']}, not {PREEMPTED}")
    if not shrink["kueue_said"]:
        problems.append("no Event of Kueue says why it evicted the increments")
    elif not shrink["quoted"]:
        problems.append(f"no Event of the elastic job quotes Kueue's reason: {shrink['kueue_said']}")
    return problems


def _meanwhile_problems(
    urgent: Mapping[str, Any], meanwhile: Mapping[str, Any], shrink: Mapping[str, Any]
) -> list[str]:
    problems: list[str] = []
    job = urgent["job"]
    if urgent["first_step_s"] <= shrink["last_step_s"]:
        problems.append(
            f"{job} trained at {urgent['first_step_s']} s, before the replicas that made room for it had made their last "
            f"step at {shrink['last_step_s']} s: together more than the quota"
        )
    elif not meanwhile["steps"]:
        problems.append(f"the elastic job made no step while {job} trained; its minimum size should have continued")
    elif meanwhile["sizes"] != [shrink["to"]]:
        problems.append(
            f"the elastic job trained with {meanwhile['sizes']} replicas beside {job}, not with {shrink['to']}"
        )
    if meanwhile["recoveries"]:
        problems.append(f"the elastic job had to recover {meanwhile['recoveries']} times while {job} was there")
    return problems
