"""The observed objects that an explanation of a job rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from elastipod_operator.core.history import HistoryEntry, decode_history
from elastipod_operator.core.names import ANNOTATION_HISTORY, ANNOTATION_SIZE, LABEL_QUEUE
from elastipod_operator.core.reasons import AnyReason, as_reason
from elastipod_operator.core.record import Record
from elastipod_operator.kube.job_annotations import record_of
from elastipod_operator.kube.reading import Body, annotations_of, labels_of, mapping, mappings, name_of, text
from elastipod_operator.kube.times import time_or

UNKNOWN = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Objects as the API server shows them, and the time.

    nodes: by name, those on which pods of the job run. cluster_queue, local_queue: those of the job's queue; None if it has
    none or they do not exist. unread: kinds of objects that could not be read, each with the reason.
    """

    now: datetime
    job: Body
    pods: Sequence[Body] = ()
    nodes: Mapping[str, Body] = field(default_factory=dict)
    workloads: Sequence[Body] = ()
    local_queue: Body | None = None
    cluster_queue: Body | None = None
    events: Sequence[Body] = ()
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportedCondition:
    """One entry of status.conditions. since: its lastTransitionTime; None if it has none."""

    type: str
    status: bool
    reason: AnyReason
    message: str
    since: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What the job's own object says. Sizes count replicas; `running` is 0 while no generation runs."""

    name: str
    """Namespace and name."""
    created_at: datetime
    deleting_since: datetime | None
    conditions: tuple[ReportedCondition, ...]
    record: Record | None
    history: tuple[HistoryEntry, ...]
    running: int
    target: int
    maximum: int
    queue: str
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> ReportedCondition | None:
        """The condition that is the present state, which is the last one; None before an operator has seen the job."""
        return self.conditions[-1] if self.conditions else None

    @property
    def has_ended(self) -> bool:
        return self.state is not None and self.state.type in ("Completed", "Failed")


def job_facts(job: Body, now: datetime) -> JobFacts:
    """Read a job. Parts that nobody can read count as absent."""
    meta, status = mapping(job.get("metadata")), mapping(job.get("status"))
    annotations = annotations_of(job)
    running, target, maximum = _sizes(annotations.get(ANNOTATION_SIZE, ""))
    deletion = meta.get("deletionTimestamp")
    record = record_of(job)[0]
    return JobFacts(
        name=f"{text(meta.get('namespace'))}/{name_of(job)}",
        created_at=time_or(meta.get("creationTimestamp"), now),
        deleting_since=time_or(deletion, now) if deletion else None,
        conditions=tuple(_condition(one) for one in mappings(status.get("conditions"))),
        record=record,
        history=decode_history(annotations.get(ANNOTATION_HISTORY, "[]")),
        running=running,
        target=target,
        maximum=maximum,
        # A LocalQueue named default adopts jobs without the label; the record says so.
        queue=labels_of(job).get(LABEL_QUEUE, "") or (record.queue if record is not None else ""),
        annotations=annotations,
    )


def job_began(job: JobFacts, state: ReportedCondition) -> datetime | None:
    """Give when the present transition began, else when the state did."""
    transition = job.record.transition if job.record is not None else None
    return transition.began_at if transition is not None else state.since


def _condition(found: Body) -> ReportedCondition:
    since = time_or(found.get("lastTransitionTime"), UNKNOWN)
    return ReportedCondition(
        text(found.get("type")),
        found.get("status") == "True",
        as_reason(text(found.get("reason"))),
        text(found.get("message")),
        since if since is not UNKNOWN else None,
    )


def _sizes(written: str) -> tuple[int, int, int]:
    """Read the annotation of the size: running/target/maximum."""
    parts = written.split("/")
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 10 for part in parts):
        return 0, 0, 0
    return int(parts[0]), int(parts[1]), int(parts[2])
