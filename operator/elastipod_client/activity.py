"""What a job does now, in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from elastipod_operator.core.reasons import Reason
from elastipod_operator.core.record import Record, TransitionKind
from elastipod_operator.core.wording import counted

from .situation import JobFacts, ReportedCondition, job_began
from .spans import since_text, span_text, time_text


@dataclass(frozen=True, slots=True)
class Activity:
    """A sentence without its full stop. since: when it began; None if unknown."""

    text: str
    since: datetime | None


def activity(job: JobFacts, now: datetime) -> Activity:
    """Say what the job does, and since when."""
    state = job.state
    if job.deleting_since is not None:
        return _dated("is being deleted", job.deleting_since, now)
    if state is None:
        return _dated("was created, but no operator has looked at it", job.created_at, now)
    if state.type in ("Completed", "Failed"):
        return _ended(job, state, now)
    if state.type == "Suspended":
        if job.record is not None and job.record.members:
            return _dated("stops its workers, to be suspended,", job_began(job, state), now)
        what = "cannot be run" if state.reason == Reason.INVALID_SPEC else "is suspended, and no worker runs,"
        return _dated(what, state.since, now)
    if state.type in ("Running", "Faulted"):
        return _running(job, state, now)
    has_trained = job.record is not None and job.record.generation > 0
    return _dated("waits to train again" if has_trained else "waits to start training", job_began(job, state), now)


def _dated(what: str, since: datetime | None, now: datetime) -> Activity:
    return Activity(f"{what} {since_text(since, now)}".rstrip(), since)


def _ended(job: JobFacts, state: ReportedCondition, now: datetime) -> Activity:
    what = "has completed" if state.type == "Completed" else "has failed"
    if state.since is None:
        return Activity(what, None)
    took = span_text(state.since - job.created_at)
    return Activity(f"{what} at {time_text(state.since, now)}, {took} after it was created", state.since)


def _running(job: JobFacts, state: ReportedCondition, now: datetime) -> Activity:
    record = job.record
    if record is None or not record.generation:
        return _dated("runs", state.since, now)
    transition = record.transition
    if transition is None:
        if record.running_since is None:
            what = f"starts the workers of generation {record.generation} on {_replicas(job, record)}"
            return _dated(what, record.generation_began_at or state.since, now)
        return _dated(
            f"trains on {_replicas(job, record)}, in generation {record.generation},", record.running_since, now
        )
    if transition.kind is TransitionKind.RECOVERY or state.reason == Reason.RECOVERING or state.type == "Faulted":
        what = f"does not train: it recovers from a fault of generation {record.generation}"
        return _dated(what, transition.detected_at, now)
    return _dated(f"resizes from {transition.from_size} to {_target(transition.target_size)}", transition.began_at, now)


def _target(size: int) -> str:
    return counted(size, "replica")


def _replicas(job: JobFacts, record: Record) -> str:
    return f"{len(record.members)} of at most {counted(max(job.maximum, len(record.members)), 'replica')}"
