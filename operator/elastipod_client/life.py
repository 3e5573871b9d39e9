"""The life of a job from its history, record and Events: changes of generation, phases, and where its time went. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from elastipod_operator.core.history import HistoryEntry
from elastipod_operator.core.phase_accounting import UNCOUNTED, goodput, total, total_by_depth
from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Depth, TransitionKind
from elastipod_operator.core.record_codec import format_time
from elastipod_operator.kube.reading import Body, text

from .condition_blockers import event_time
from .picture import DEPTH_NAMES, JobPhase, Note, Span, Timeline, depth_label, depth_tip
from .situation import JobFacts
from .spans import span_text, time_text

# More notes than this could not be read; the newest are the news.
MAX_NOTES = 16
HOURS_BEYOND = timedelta(hours=2)
STOPPED_ALL = "all workers stop"


@dataclass(frozen=True, slots=True)
class Life:
    """What is known of a job's life. stops: when all workers were stopped for a suspension, as far as Events still say so."""

    job: JobFacts
    stops: tuple[datetime, ...]
    now: datetime

    @property
    def end(self) -> datetime:
        """When the job ended, else now."""
        state = self.job.state
        return state.since if self.job.has_ended and state is not None and state.since is not None else self.now

    @property
    def training_end(self) -> datetime:
        """When the present generation ceased to train: the beginning of the change that is in progress, else the end."""
        transition = self.job.record.transition if self.job.record is not None else None
        return min(transition.detected_at, self.end) if transition is not None else self.end

    def phase_times(self) -> dict[str, timedelta]:
        """Give the time that each phase took so far, by its name; empty if the record cannot be read."""
        return total(self.job.record.phase_times, self.now) if self.job.record is not None else {}

    def times_by_depth(self) -> dict[str, timedelta]:
        """Give the time that resizes and recoveries of each depth took so far."""
        return total_by_depth(self.job.record.phase_times, self.now) if self.job.record is not None else {}


def life_of(job: JobFacts, events: Sequence[Body], now: datetime) -> Life:
    """Give the life of a job until now, or until its newest known time if the clock here is behind."""
    known = (at for entry in job.history for at in (entry.at, entry.detected_at, entry.running_at) if at is not None)
    now = max([now, job.created_at, *known])
    stops = sorted(
        event_time(event, job.created_at)
        for event in events
        if text(event.get("reason")) == Reason.DRAINING and text(event.get("message")).startswith(STOPPED_ALL)
    )
    return Life(job, tuple(stops), now)


def spans_of(life: Life) -> tuple[Span, ...]:
    """Give the phases since the creation, without overlaps. A generation ends where the next change was seen to begin."""
    found: list[Span] = []
    start = life.job.created_at
    entries = life.job.history

    def add(phase: JobPhase, begin: datetime, end: datetime, size: int) -> None:
        if end > begin:
            found.append(Span(phase, (begin - start).total_seconds(), (end - start).total_seconds(), size))

    for entry, following in zip(entries, [*entries[1:], None], strict=False):
        # The history has the newest changes only; one that has generation 1 begins with the job.
        begins = start if entry.generation == 1 else entry.detected_at
        running = entry.running_at or (following.detected_at if following is not None else life.training_end)
        if entry.kind is TransitionKind.RESIZE and entry.depth is not Depth.MEMORY:
            add(JobPhase.DRAINING, begins, entry.at, entry.from_size)
            begins = entry.at
        add(_phase_before_training(entry), begins, running, entry.to_size)
        ends = max(running, following.detected_at if following is not None else life.training_end)
        if following is None or following.from_size:
            add(JobPhase.TRAINING, running, ends, entry.to_size)
            continue
        # Then the job was suspended, or its quota was lost. The history does not say when; Events do while they are kept.
        stopped = next((at for at in life.stops if running <= at <= ends), None)
        add(JobPhase.TRAINING if stopped else JobPhase.UNKNOWN, running, stopped or ends, entry.to_size)
    return tuple(found)


def _phase_before_training(entry: HistoryEntry) -> JobPhase:
    if entry.depth is Depth.MEMORY:
        return JobPhase.IN_MEMORY
    if entry.kind is TransitionKind.RECOVERY:
        return JobPhase.RECOVERING
    return JobPhase.STARTING if entry.kind is TransitionKind.START else JobPhase.RESTARTING


def timeline_of(life: Life) -> Timeline:
    """Give the picture's content: in seconds, or in hours for a long life."""
    is_long = life.end - life.job.created_at > HOURS_BEYOND
    scale = 3600.0 if is_long else 1.0
    spans = [Span(span.phase, span.start_s / scale, span.end_s / scale, span.size) for span in spans_of(life)]
    notes = [
        Note(
            (entry.detected_at - life.job.created_at).total_seconds() / scale,
            note_text(entry),
            _depth(entry),
            _tip(entry),
        )
        for entry in life.job.history
        if entry.kind is not TransitionKind.START
    ]
    return Timeline(f"Job {life.job.name}", spans, (), notes[-MAX_NOTES:], unit="hours" if is_long else "seconds")


def note_text(entry: HistoryEntry) -> str:
    """Give the text of a change in the picture: sizes and pause, the cause, and the depth."""
    pause = "" if entry.running_at is None else f", {(entry.running_at - entry.detected_at).total_seconds():.1f} s"
    return f"{entry.from_size} → {entry.to_size}{pause}\n{entry.cause}{depth_label(_depth(entry))}"


def _tip(entry: HistoryEntry) -> str:
    change = f"generation {entry.generation}: {entry.kind.value} {entry.from_size} → {entry.to_size}, {entry.cause}"
    return depth_tip(change, _depth(entry), entry.depth_code.told(entry.depth_reason))


def _depth(entry: HistoryEntry) -> str | None:
    return entry.depth.value if entry.depth is not None else None


HEADS = ("TIME", "GENERATION", "SIZE", "KIND", "CAUSE", "DEPTH", "UNTIL RUNNING", "REASON FOR THE DEPTH")


def rows(life: Life) -> list[tuple[str, ...]]:
    """Give the changes as rows of text, below their heads."""
    return [
        HEADS,
        *(
            (
                time_text(entry.detected_at, life.now), str(entry.generation), f"{entry.from_size} → {entry.to_size}",
                entry.kind.value, str(entry.cause), _depth(entry) or "",
                _until_running(entry, is_last=at == len(life.job.history)), entry.depth_code.told(entry.depth_reason),
            )
            for at, entry in enumerate(life.job.history, start=1)
        ),
    ]  # fmt: skip


def _until_running(entry: HistoryEntry, *, is_last: bool) -> str:
    """Say how long a generation took to run. One that another replaced before it ran never will."""
    if entry.running_at is not None:
        return span_text(entry.running_at - entry.detected_at)
    return "not yet" if is_last else "never"


def sums_text(life: Life) -> str:
    """Say where the time went, the longest phase first, and what changes of each depth took; empty if unknown."""
    times = _longest_first(life.phase_times())
    total_time = sum((time for _, time in times), timedelta())
    if not total_time:
        return ""
    parts = [f"{phase} {span_text(time)} ({time / total_time:.0%})" for phase, time in times]
    changes = [f"{DEPTH_NAMES[depth]} {span_text(time)}" for depth, time in _longest_first(life.times_by_depth())]
    told = f"In {span_text(total_time)}: {', '.join(parts)}."
    return f"{told} Resizes and recoveries, until new steps: {', '.join(changes)}." if changes else told


def goodput_text(life: Life) -> str:
    """Say which share of the job's own time was training, and what changes cost; empty before it has trained."""
    record = life.job.record
    share = goodput([record.phase_times], life.now) if record is not None else None
    if not share:
        return ""
    counted = sum((time for phase, time in life.phase_times().items() if phase not in UNCOUNTED), timedelta())
    told = f"It trained for {share:.0%} of the {span_text(counted)} outside queues and suspensions"
    changes = sum(life.times_by_depth().values(), timedelta())
    return f"{told}; resizes and recoveries took {span_text(changes)} until new steps" if changes else told


def _longest_first(times: dict[str, timedelta]) -> list[tuple[str, timedelta]]:
    return sorted(((name, time) for name, time in times.items() if time), key=lambda pair: -pair[1])


def as_json(life: Life) -> dict[str, Any]:
    """Give all of it for -o json: changes, phases in seconds since the creation, and the sums in seconds."""
    return {
        "job": life.job.name,
        "createdAt": format_time(life.job.created_at),
        "changes": [
            {
                "generation": entry.generation, "from": entry.from_size, "to": entry.to_size, "kind": entry.kind.value,
                "cause": str(entry.cause), "detectedAt": format_time(entry.detected_at), "at": format_time(entry.at),
                "runningAt": format_time(entry.running_at), "depth": _depth(entry), "depthReason": entry.depth_reason,
                "depthCode": entry.depth_code.value,
            }
            for entry in life.job.history
        ],
        "phases": [
            {"phase": span.phase.value, "startSeconds": round(span.start_s, 3), "endSeconds": round(span.end_s, 3), "size": span.size}
            for span in spans_of(life)
        ],
        "phaseSeconds": {phase: time.total_seconds() for phase, time in sorted(life.phase_times().items())},
        "changeSeconds": {depth: time.total_seconds() for depth, time in sorted(life.times_by_depth().items())},
    }  # fmt: skip
