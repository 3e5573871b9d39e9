"""What a plan may ask of the shell. Every action is safe to repeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from .history import HistoryEntry
from .names import PodId
from .reasons import AnyReason, Reason, Severity
from .record import Record, RestartMode
from .snapshot import Condition


@dataclass(frozen=True, slots=True)
class CreatePod:
    """generation: the newest one of the job, for the pod's label. avoids: nodes that it must not be placed on.

    workload: on whose quota it runs; empty without a queue. only_on: host names of the nodes that it is restricted to; empty: any.
    failures_before: how many pods of its slot in a row have failed before it without training.
    """

    pod: PodId
    nnodes: int
    generation: int = 0
    avoids: tuple[str, ...] = ()
    workload: str = ""
    only_on: tuple[str, ...] = ()
    failures_before: int = 0


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete by name and UID. force: remove the object at once, for pods whose kubelet will never answer.

    grace_s: grace period of the deletion, at least 1; None for that of the pod.
    """

    name: str
    uid: str
    reason: str
    force: bool = False
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """is_early: in the generation that follows a drain, while others still drain."""

    pod: str
    group_rank: int
    is_early: bool = False


@dataclass(frozen=True, slots=True)
class AssignSpare:
    """Tell an agent that it is a spare of the present generation; it stays ready."""

    pod: str
    number: int


@dataclass(frozen=True, slots=True)
class PrepareWorkers:
    """Tell an agent to start its workers ahead of the next generation, in which they have no rank yet.

    They get the state of those who train, as the present generation goes on.
    """

    pod: str


@dataclass(frozen=True, slots=True)
class StopWorkers:
    """graceful: drain, within timeout_s seconds; otherwise end the workers at once. reach: what the next start restarts.

    leaves: whether the pod goes afterwards (True) or stays (False), None when that is not decided yet. keeps: workers that can live
    through the change keep their processes. next_rank: the group rank in the generation that the agent begins by itself afterwards;
    None for none.
    """

    pod: str
    generation: int
    graceful: bool
    timeout_s: int
    reach: RestartMode = RestartMode.IN_PROCESS
    leaves: bool | None = None
    keeps: bool = False
    next_rank: int | None = None


@dataclass(frozen=True, slots=True)
class ShutDownAgent:
    pod: str


@dataclass(frozen=True, slots=True)
class ListPods:
    """List the job's pods at the API server, because a watch may have missed a deletion."""


@dataclass(frozen=True, slots=True)
class SetQueueLabel:
    """Write the queue that the job is in into its label, together with the record."""

    queue: str


@dataclass(frozen=True, slots=True)
class CreateWorkload:
    """Create a Workload in this queue. counts: pods by spec, spares included."""

    number: int
    counts: tuple[tuple[str, int], ...]
    queue: str


@dataclass(frozen=True, slots=True)
class DeleteWorkload:
    """Delete a Workload: return its quota once the API server lists no pod of its slots, or withdraw the request."""

    name: str
    uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class ReleaseBaseQuota:
    """Release the quota of an evicted base Workload, which stays in the queue. Only once no pod of its slots exists."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class FinishWorkload:
    """Mark a Workload as finished. Only once no pod of its slots exists."""

    name: str
    uid: str
    succeeded: bool
    message: str


@dataclass(frozen=True, slots=True)
class SetPodsReady:
    """Tell Kueue whether all pods of an admitted Workload are ready. was_ready: they all were before."""

    name: str
    uid: str
    ready: bool
    was_ready: bool


@dataclass(frozen=True, slots=True)
class UpdateWorkloadPriority:
    """Update the priority of a Workload to that of the job."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    present: bool


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job: its ttlSecondsAfterFinished has passed."""


Action = (
    CreatePod
    | DeletePod
    | StartWorkers
    | AssignSpare
    | PrepareWorkers
    | StopWorkers
    | ShutDownAgent
    | ListPods
    | SetQueueLabel
    | CreateWorkload
    | DeleteWorkload
    | ReleaseBaseQuota
    | FinishWorkload
    | SetPodsReady
    | UpdateWorkloadPriority
    | SetFinalizer
    | DeleteJob
)


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A Kubernetes Event for the job, written after the change that it reports."""

    reason: AnyReason
    message: str

    @property
    def is_warning(self) -> bool:
        """Whether the Event is a warning, as its reason documents. A reason of another party is that of a fault."""
        return not isinstance(self.reason, Reason) or self.reason.severity is not Severity.INFO


class JobSize(NamedTuple):
    """Replicas that train, those after the change in progress, and the maximum."""

    running: int
    target: int
    maximum: int

    def __str__(self) -> str:
        return "/".join(map(str, self))


NO_SIZE = JobSize(0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A decision: the record to be written first, then actions in their order, then status and events.

    history: entries to append. running_since: when all agents of record.generation answered RUNNING. wake_at: when to decide
    again at the latest. skips_record: the record belongs to a newer operator and is not written. adopts_spec: pods are created
    from the present spec from now on. status_waits: the status is not due yet, nor are the Events of conditions, which come
    with it.
    """

    record: Record
    actions: tuple[Action, ...] = ()
    conditions: tuple[Condition, ...] = ()
    size: JobSize = NO_SIZE
    events: tuple[JobEvent, ...] = ()
    status_waits: bool = False
    history: tuple[HistoryEntry, ...] = ()
    running_since: datetime | None = None
    wake_at: datetime | None = None
    status: dict[str, Any] = field(default_factory=dict)
    skips_record: bool = False
    adopts_spec: bool = False
