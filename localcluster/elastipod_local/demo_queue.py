"""The demo's second act, computed from what was written down: an urgent job arrives in the elastic job's queue and leaves.

As in `demo_report`, everything is a pure function of those records, and moments count from the elastic job's creation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from elastipod_local.demo_report import Change, Json, Kind, Phase, Run, Span, changes, losses, resize_json
from elastipod_local.demo_watch import Told
from elastipod_local.run_log import Step

PREEMPTED = "Preempted"  # as Kueue names it, and the operator after it


@dataclass(frozen=True, slots=True)
class Visit:
    """The urgent job's stay. run: its own, which begins when it was applied; state: its last condition.

    audit and audit_exit: what `elastipod audit --json` found in its sample logs. told: the Events of the elastic job
    and its Workloads.
    """

    job: str
    run: Run
    state: str
    audit: Mapping[str, Any] = field(default_factory=dict)
    audit_exit: int = 0
    told: Sequence[Told] = ()

    @property
    def steps(self) -> tuple[Step, ...]:
        """Every step that it made, in order."""
        return _steps(self.run)


def _steps(run: Run) -> tuple[Step, ...]:
    return tuple(step for generation in run.generations for step in generation.steps)


def queue_report(run: Run, visit: Visit) -> Json:
    """Give the report of the second act; a part that did not happen is None. run: the elastic job's."""
    shrink, growth = given_up(run, visit), grown_back(run, visit)
    return {
        "newcomer": _newcomer(run, visit),
        "given_up": _given_up(run, visit, shrink) if shrink else None,
        "meanwhile": _meanwhile(run, visit),
        "grown_back": _grown_back(visit, growth) if growth else None,
    }


def given_up(run: Run, visit: Visit) -> Change | None:
    """Give the first shrink that began after the newcomer's arrival."""
    found = (c for c in _resizes_since(run, visit.run.created_at) if c.entry.size < c.entry.size_before)
    return next(found, None)


def grown_back(run: Run, visit: Visit) -> Change | None:
    """Give the first growth after that shrink."""
    shrink = given_up(run, visit)
    if shrink is None:
        return None
    found = (c for c in _resizes_since(run, shrink.entry.at) if c.entry.size > c.entry.size_before)
    return next(found, None)


def _resizes_since(run: Run, moment: float) -> list[Change]:
    return [c for c in changes(run) if c.entry.kind is Kind.RESIZE and c.entry.began_at >= moment]


def visit_spans(run: Run, visit: Visit) -> tuple[Span, ...]:
    """Give the phases in which the newcomer trained."""
    sizes = {entry.generation: entry.size for entry in visit.run.history}
    return tuple(
        Span(
            Phase.TRAINING,
            run.since_creation(generation.steps[0].at),
            run.since_creation(generation.steps[-1].at),
            sizes.get(generation.number, generation.world_size),
        )
        for generation in visit.run.generations
        if generation.steps
    )


def visit_losses(run: Run, visit: Visit) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Give (seconds, loss) of every step of the newcomer that reported one, one tuple for each generation."""
    later = visit.run.created_at - run.created_at
    return tuple(tuple((round(at_s + later, 3), loss) for at_s, _, loss in curve) for curve in losses(visit.run))


def _newcomer(run: Run, visit: Visit) -> Json:
    """quota_after_s: from its arrival until Kueue had granted its quota."""
    steps = visit.steps
    spans = visit_spans(run, visit)
    return {
        "job": visit.job,
        "state": visit.state,
        "replicas": spans[0].size if spans else None,
        "arrived_s": run.since_creation(visit.run.created_at),
        "quota_after_s": visit.run.since_creation(visit.run.history[0].began_at) if visit.run.history else None,
        "first_step_s": run.since_creation(steps[0].at) if steps else None,
        "last_step_s": run.since_creation(steps[-1].at) if steps else None,
        "steps": len(steps),
        **{name: visit.audit.get(name) for name in ("samples_total", "samples_unique", "samples_expected")},
        "audit_exit": visit.audit_exit,
        "audit": dict(visit.audit),
    }


def _given_up(run: Run, visit: Visit, change: Change) -> Json:
    """kueue_said: why Kueue took the quota back; quoted: whether an Event of the job repeats it."""
    before = [g.steps[-1].at for g in run.generations if g.number < change.entry.generation and g.steps]
    said = next((event.message for event in reversed(visit.told) if _is_eviction(event)), "")
    return {
        **resize_json(change),
        "asked_s": run.since_creation(change.entry.began_at),
        "last_step_s": run.since_creation(before[-1]),
        "kueue_said": said,
        "quoted": bool(said) and any(said in event.message for event in visit.told if event.kind != "Workload"),
    }


def _is_eviction(event: Told) -> bool:
    return event.kind == "Workload" and event.reason == f"EvictedDueTo{PREEMPTED}"


def _meanwhile(run: Run, visit: Visit) -> Json:
    """What the elastic job did while the newcomer trained; longest_pause_s: without a step, from its arrival on."""
    if not visit.steps:
        return {"steps": 0, "sizes": [], "longest_pause_s": None, "recoveries": 0}
    first, last = visit.steps[0].at, visit.steps[-1].at
    made = [step.at for step in _steps(run)]
    trained = {g.number for g in run.generations if any(first <= step.at <= last for step in g.steps)}
    pauses = [after - before for before, after in pairwise(made) if after >= visit.run.created_at and before <= last]
    return {
        "steps": sum(first <= at <= last for at in made),
        "sizes": [size for size, _ in groupby(entry.size for entry in run.history if entry.generation in trained)],
        "longest_pause_s": round(max(pauses), 3) if pauses else None,
        "recoveries": sum(
            entry.kind is Kind.RECOVERY and visit.run.created_at <= entry.began_at <= last for entry in run.history
        ),
    }


def _grown_back(visit: Visit, change: Change) -> Json:
    """after_s: from the newcomer's last step to the decision to grow."""
    last = visit.steps[-1].at if visit.steps else visit.run.created_at
    return {**resize_json(change), "after_s": round(change.entry.began_at - last, 3)}


def queue_shortcomings(report: Mapping[str, Any]) -> list[str]:
    """Say in sentences what the second act was meant to show and did not; empty when all held."""
    guest, shrink = report["newcomer"], report["given_up"]
    meanwhile, growth = report["meanwhile"], report["grown_back"]
    said = _about_newcomer(guest)
    if shrink is None:
        said.append(f"the elastic job gave up no replicas after {guest['job']} had arrived")
        return said
    said += _about_shrink(shrink)
    if guest["steps"]:
        said += _about_meanwhile(guest, meanwhile, shrink)
    if growth is None:
        said.append(f"the elastic job did not grow back after {guest['job']}")
    return said


def _about_newcomer(guest: Mapping[str, Any]) -> list[str]:
    said = []
    if guest["state"] != "Completed":
        said.append(f"{guest['job']} ended as {guest['state']}, not Completed")
    if not guest["steps"]:
        said.append(f"{guest['job']} made no step")
    if guest["audit_exit"] != 0:
        said.append(f"the audit found that {guest['job']} did not train its samples exactly once: {guest['audit']}")
    return said


def _about_shrink(shrink: Mapping[str, Any]) -> list[str]:
    said = []
    if shrink["cause"] != PREEMPTED:
        said.append(f"the elastic job shrank because of {shrink['cause']}, not {PREEMPTED}")
    if not shrink["kueue_said"]:
        said.append("no Event of Kueue says why it took the increments' quota back")
    elif not shrink["quoted"]:
        said.append(f"no Event of the elastic job quotes Kueue's reason: {shrink['kueue_said']}")
    return said


def _about_meanwhile(guest: Mapping[str, Any], meanwhile: Mapping[str, Any], shrink: Mapping[str, Any]) -> list[str]:
    said, job = [], guest["job"]
    if guest["first_step_s"] <= shrink["last_step_s"]:
        said.append(
            f"{job} trained at {guest['first_step_s']} s, before the replicas that made room for it had made their last "
            f"step at {shrink['last_step_s']} s: together more than the quota"
        )
    elif not meanwhile["steps"]:
        said.append(f"the elastic job made no step while {job} trained; its minimum was to go on")
    elif meanwhile["sizes"] != [shrink["to"]]:
        said.append(f"the elastic job trained with {meanwhile['sizes']} replicas beside {job}, not with {shrink['to']}")
    if meanwhile["recoveries"]:
        said.append(f"the elastic job had to recover {meanwhile['recoveries']} times during the stay of {job}")
    return said
