"""The report of a demo run, computed from its records: history, sample logs, marks, audit.

Everything here is a pure function of those records, so every figure in a report can be traced to its source.
Input times are Unix seconds of one machine's clock; output times count from the job's creation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from itertools import groupby
from typing import Any

from elastipod_client.picture import JobPhase as JobPhase
from elastipod_client.picture import Span as Span
from elastipod_local.demo.run_log import Generation
from elastipod_operator.core.depth_reasons import DepthReason

Json = dict[str, Any]


class Kind(StrEnum):
    """Why a generation began, as the operator's history names it."""

    START = "start"
    RESIZE = "resize"
    RECOVERY = "recovery"


@dataclass(frozen=True, slots=True)
class HistoryEntry:
    """One entry of the annotation elastipod.io/history: the decision that began a generation."""

    generation: int
    size_before: int
    size: int
    kind: Kind
    cause: str
    at: float
    detected_at: float | None
    running_at: float | None
    depth: str | None = None
    """How deep the change went: memory, process, pod or job; None for the first start."""
    depth_reason: str = ""
    depth_code: DepthReason = DepthReason.UNKNOWN

    @property
    def began_at(self) -> float:
        """When the change began: its cause was seen then, before the decision to start the new generation."""
        return self.at if self.detected_at is None else min(self.at, self.detected_at)


@dataclass(frozen=True, slots=True)
class Mark:
    """An action of the demo on the cluster, with its time in Unix seconds."""

    name: str
    at: float


@dataclass(frozen=True, slots=True)
class Change:
    """One change of generation. gap_s: last old step to first new step; None if the new one made no step.

    steps_repeated: steps of the old generation that the new one repeated, one that was interrupted included. detection_s: from the
    mark of the kill to the operator's detection. lost_s: from the last old step to the kill, which is what was computed of the step that
    it interrupted. Both None for a resize, or without such a mark. pause_s: the gap without lost_s and the time that a step usually takes,
    so a pause begins with the fault, as those of the benchmarks do.
    """

    entry: HistoryEntry
    gap_s: float | None
    steps_repeated: int
    detection_s: float | None = None
    lost_s: float | None = None
    pause_s: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """All records of one run; `created_at` is the job's creation."""

    created_at: float
    history: tuple[HistoryEntry, ...]
    generations: tuple[Generation, ...]
    marks: tuple[Mark, ...]

    def since_creation(self, at: float) -> float:
        """Give a moment as seconds since the job's creation, to the millisecond."""
        return round(at - self.created_at, 3)


KILL_MARK = "worker killed"


def parse_history(entries: Sequence[Mapping[str, Any]]) -> tuple[HistoryEntry, ...]:
    """Read the annotation's JSON list. Raises KeyError or ValueError if it violates the contract."""
    return tuple(
        HistoryEntry(
            generation=int(entry["generation"]),
            size_before=int(entry["from"]),
            size=int(entry["to"]),
            kind=Kind(entry["kind"]),
            cause=str(entry["cause"]),
            at=unix_seconds(entry["at"]),
            detected_at=unix_seconds(entry["detected_at"]) if entry.get("detected_at") else None,
            running_at=unix_seconds(entry["running_at"]) if entry.get("running_at") else None,
            depth=entry.get("depth"),
            depth_reason=str(entry.get("depth_reason", "")),
            depth_code=DepthReason(str(entry.get("depth_code", ""))),
        )
        for entry in entries
    )


def unix_seconds(moment: str) -> float:
    """Give an RFC 3339 moment as Unix seconds."""
    return datetime.fromisoformat(moment.replace("Z", "+00:00")).timestamp()


def changes(run: Run) -> tuple[Change, ...]:
    """Give every change of generation after the first start, in order."""
    made = {generation.number: generation for generation in run.generations}
    found = []
    for entry in run.history:
        new = made.get(entry.generation)
        old = _latest_with_steps(run.generations, before=entry.generation)
        if entry.kind is Kind.START or old is None:
            continue
        killed_at = _killed_at(entry, run)
        lost_s = _lost_s(old, killed_at)
        found.append(
            Change(
                entry,
                gap_s=_gap_s(old, new),
                steps_repeated=_steps_repeated(old, new),
                detection_s=_detection_s(entry, killed_at),
                lost_s=lost_s,
                pause_s=_pause_s(old, new, lost_s or 0.0),
            )
        )
    return tuple(found)


def _latest_with_steps(generations: Sequence[Generation], *, before: int) -> Generation | None:
    return next((g for g in reversed(generations) if g.number < before and g.steps), None)


def _gap_s(old: Generation, new: Generation | None) -> float | None:
    if new is None or new.first is None or old.last is None:
        return None
    return round(new.first.at - old.last.at, 3)


def _pause_s(old: Generation, new: Generation | None, lost_s: float) -> float | None:
    gap_s = _gap_s(old, new)
    step_s = (new.step_s if new is not None else None) or old.step_s
    return None if gap_s is None or step_s is None else round(max(0.0, gap_s - lost_s - step_s), 3)


def _lost_s(old: Generation, killed_at: float | None) -> float | None:
    if killed_at is None or old.last is None:
        return None
    return round(max(0.0, killed_at - old.last.at), 3)  # those who live on may complete a step after it


def _steps_repeated(old: Generation, new: Generation | None) -> int:
    return 0 if new is None else max(0, old.begun_step - new.resumed_step)


def _detection_s(entry: HistoryEntry, killed_at: float | None) -> float | None:
    if killed_at is None or entry.detected_at is None:
        return None
    return round(entry.detected_at - killed_at, 3)


def _killed_at(entry: HistoryEntry, run: Run) -> float | None:
    """Give the kill that a recovery followed. A kill belongs to the first recovery after it: a later one has a cause of its own."""
    if entry.kind is not Kind.RECOVERY:
        return None
    earlier = (other.at for other in run.history if other.kind is Kind.RECOVERY and other.generation < entry.generation)
    since = max(earlier, default=run.created_at)
    return max((mark.at for mark in run.marks if mark.name == KILL_MARK and since < mark.at <= entry.at), default=None)


def spans(run: Run) -> tuple[Span, ...]:
    """Give the phases from the job's creation to its last step, without gaps or overlaps."""
    stages = [
        (entry, generation)
        for entry in run.history
        for generation in run.generations
        if generation.number == entry.generation and generation.steps
    ]
    found: list[Span] = []
    clock = run.created_at
    for index, (entry, generation) in enumerate(stages):
        first, last = generation.steps[0], generation.steps[-1]
        found.append(_span(run, _phase_before_training(entry, index), clock, first.at, entry.size))
        following = stages[index + 1][0] if index + 1 < len(stages) else None
        drained_at = generation.drained_at if following and following.kind is Kind.RESIZE else None
        asked_at = min(last.at, max(first.at, following.began_at)) if following and drained_at else last.at
        found.append(_span(run, JobPhase.TRAINING, first.at, asked_at, entry.size))
        clock = max(last.at, drained_at or last.at)
        found.append(_span(run, JobPhase.DRAINING, asked_at, clock, entry.size))
    return tuple(span for span in found if span.end_s > span.start_s)


def _phase_before_training(entry: HistoryEntry, index: int) -> JobPhase:
    if index == 0:
        return JobPhase.STARTING
    if entry.depth == "memory":
        return JobPhase.IN_MEMORY
    return JobPhase.RECOVERING if entry.kind is Kind.RECOVERY else JobPhase.RESTARTING


def _span(run: Run, phase: JobPhase, start: float, end: float, size: int) -> Span:
    return Span(phase, run.since_creation(start), run.since_creation(end), size)


def sizes(run: Run) -> tuple[int, ...]:
    """Give the sizes that trained, in order; a recovery at the same size adds none."""
    trained = {generation.number for generation in run.generations if generation.steps}
    return tuple(size for size, _ in groupby(entry.size for entry in run.history if entry.generation in trained))


def losses(run: Run) -> tuple[tuple[tuple[float, int, float], ...], ...]:
    """Give (seconds since creation, step, loss) of every step that reported one, one tuple for each generation."""
    return tuple(
        tuple(
            (run.since_creation(step.at), step.number, step.loss) for step in generation.steps if step.loss is not None
        )
        for generation in run.generations
    )


def build_report(run: Run, audit: Mapping[str, Any]) -> Json:
    """Give the report. audit: what `elastipod audit --json` printed; its totals are taken over as they are."""
    found = changes(run)
    phases = spans(run)
    curve = [point for generation in losses(run) for point in generation]
    return {
        "resizes": [resize_json(change) for change in found if change.entry.kind is Kind.RESIZE],
        "recoveries": [_recovery(change) for change in found if change.entry.kind is Kind.RECOVERY],
        **{name: audit.get(name) for name in ("samples_total", "samples_unique", "samples_expected")},
        "final_loss": curve[-1][2] if curve else None,
        "final_step": curve[-1][1] if curve else None,
        "sizes": list(sizes(run)),
        "size_history": _size_history(phases),
        "phases": [asdict(span) for span in phases],
        "phase_seconds": {
            phase: round(sum(span.end_s - span.start_s for span in phases if span.phase is phase), 3)
            for phase in JobPhase
            if phase is not JobPhase.UNKNOWN
        },
        "marks": [{"name": mark.name, "t_s": run.since_creation(mark.at)} for mark in run.marks],
        "audit": dict(audit),
    }


def resize_json(change: Change) -> Json:
    """Give what a report says of a resize."""
    return {
        "generation": change.entry.generation,
        "from": change.entry.size_before,
        "to": change.entry.size,
        "cause": change.entry.cause,
        **_depth(change.entry),
        "gap_s": change.gap_s,
        **_pause(change),
        "steps_repeated": change.steps_repeated,
    }


def _depth(entry: HistoryEntry) -> Json:
    """Give how deep a change went and why; nothing where the history does not say."""
    reason = {"depth_reason": entry.depth_reason} if entry.depth_reason else {}
    code = {"depth_code": entry.depth_code.value} if entry.depth_code is not DepthReason.UNKNOWN else {}
    return {} if entry.depth is None else {"depth": entry.depth, **reason, **code}


def _pause(change: Change) -> Json:
    """Give the pause and, for a change in memory, its target and whether it was met."""
    pause: Json = {"pause_s": change.pause_s}
    if change.pause_s is None or change.entry.depth != "memory":
        return pause
    return {**pause, "pause_target_s": PAUSE_TARGET_S, "pause_target_met": change.pause_s <= PAUSE_TARGET_S}


def _recovery(change: Change) -> Json:
    return {
        "generation": change.entry.generation,
        "from": change.entry.size_before,
        "to": change.entry.size,
        "cause": change.entry.cause,
        **_depth(change.entry),
        "detection_s": change.detection_s,
        "gap_s": change.gap_s,
        "lost_s": change.lost_s,
        **_pause(change),
        "steps_repeated": change.steps_repeated,
    }


def _size_history(phases: Sequence[Span]) -> list[Json]:
    """Give each moment at which the number of training replicas changed; 0 if nothing trains."""
    moments: list[tuple[float, int]] = []
    for span in phases:
        trains = span.phase in (JobPhase.TRAINING, JobPhase.DRAINING)
        moments.append((span.start_s, span.size if trains else 0))
    if phases:
        moments.append((phases[-1].end_s, 0))
    changed = [next(group) for _, group in groupby(moments, key=lambda moment: moment[1])]
    return [{"t_s": at, "size": size} for at, size in changed]


# The goal for a change in memory. A run that misses it has not failed: machines differ, and so do the hours of one machine.
PAUSE_TARGET_S = 0.3
EXPECTED_SIZES = [2, 4, 2, 4, 2, 4, 2]
REPEATED_MAX = 1  # steps after a crash: the one in progress
FORCED_CAUSE = "ScaledByUser"  # the change for which the demo asks for new processes
PORT_TAKEN = "MasterPortTaken"  # a second attempt at a generation whose port another process had: nothing crashed


def shortcomings(report: Mapping[str, Any], *, state: str, audit_exit: int) -> list[str]:
    """Say in sentences what the run should have shown but did not; empty if everything was shown.

    state: the job's last condition; audit_exit: exit status of `elastipod audit`.
    """
    problems: list[str] = []
    if state != "Completed":
        problems.append(f"the job ended as {state}, not Completed")
    if report["sizes"] != EXPECTED_SIZES:
        problems.append(f"the sizes that trained were {_arrows(report['sizes'])}, not {_arrows(EXPECTED_SIZES)}")
    problems += [
        f"the resize {resize['from']} -> {resize['to']} repeated {resize['steps_repeated']} steps, not 0"
        for resize in report["resizes"]
        if resize["steps_repeated"] != 0
    ]
    problems += [
        f"the recovery repeated {recovery['steps_repeated']} steps, although memory holds every step"
        for recovery in report["recoveries"]
        if recovery["steps_repeated"] > REPEATED_MAX
    ]
    problems += [
        f"the change {change['from']} -> {change['to']} ({change['cause']}) went as deep as {change.get('depth', 'unknown')}"
        f"{_because(change)}, not {_expected_depth(change)}"
        for change in (*report["resizes"], *report["recoveries"])
        if change.get("depth") != _expected_depth(change)
    ]
    problems += _recovery_count_problems([recovery["cause"] for recovery in report["recoveries"]])
    if audit_exit != 0:
        problems.append(f"the audit found that samples were not trained exactly once: {report['audit']}")
    return problems


def _recovery_count_problems(causes: Sequence[str]) -> list[str]:
    """Say where the job did not recover exactly once: one worker was killed, and another crash is a fault of its own."""
    if not causes:
        return ["no recovery was seen, although a worker was killed"]
    crashes = [cause for cause in causes if cause != PORT_TAKEN]
    if len(crashes) == 1:
        return []
    return [
        f"the job recovered {len(crashes)} times although one worker was killed: causes {', '.join(crashes) or PORT_TAKEN}"
    ]


def _expected_depth(change: Mapping[str, Any]) -> str:
    return "process" if change["cause"] == FORCED_CAUSE else "memory"


def _because(change: Mapping[str, Any]) -> str:
    return f" because {change['depth_reason']}" if change.get("depth_reason") else ""


def _arrows(sizes: Sequence[int]) -> str:
    return " -> ".join(map(str, sizes)) or "none"
