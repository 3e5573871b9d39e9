"""What the shell observed, as small frozen records. Times are aware UTC datetimes of the operator's own clock, unless said otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum

from ..api.models import CleanPodPolicy
from .names import PodId
from .record import Record
from .sizes import Sizes


class AgentState(StrEnum):
    """States of an agent as they stand on the wire (HyperPod agent protocol)."""

    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAULTED = "faulted"
    STOPPING = "stopping"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class SpecShape:
    """One replicaSpec: its name and how many pods it may hold at most."""

    name: str
    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The user's wishes, defaults filled in (decision 10)."""

    sizes: Sizes
    specs: tuple[SpecShape, ...]
    scaling_timeout: timedelta = timedelta(seconds=60)
    graceful_timeout: timedelta = timedelta(seconds=600)
    faulty_timeout: timedelta = timedelta(seconds=30)
    snooze: timedelta = timedelta(0)
    min_stable: timedelta = timedelta(0)
    backoff_base: timedelta = timedelta(seconds=10)
    backoff_max: timedelta = timedelta(seconds=300)
    max_retries: int | None = None
    clean_pods: CleanPodPolicy = CleanPodPolicy.ALL
    ttl: timedelta | None = None
    suspend: bool = False
    active_deadline: timedelta | None = None
    startup_deadline: timedelta | None = None
    fault_deadline: timedelta | None = None
    agent_port: int = 8080
    container: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the job, as in status.conditions."""

    type: str
    status: bool
    reason: str
    message: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFact:
    """The job as the API server shows it."""

    namespace: str
    name: str
    uid: str
    created_at: datetime
    policy: Policy | None
    """None when the spec cannot be used; `refusal` then says why in one sentence."""
    refusal: str = ""
    record: Record | None = None
    conditions: tuple[Condition, ...] = ()
    has_finalizer: bool = False
    deleting_since: datetime | None = None
    drain_on_delete: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFact:
    """A pod of the job."""

    id: PodId
    name: str
    uid: str
    created_at: datetime
    phase: str = "Pending"
    ip: str = ""
    node: str = ""
    started: bool = False
    """True once the agent's container runs."""
    kill_at: datetime | None = None
    """metadata.deletionTimestamp: when the kubelet will kill what is left (API server's clock)."""
    disrupted: str = ""
    """Reason of a true DisruptionTarget condition, empty when there is none."""
    trouble: str = ""
    """Why it does not start or how it ended, as one sentence; empty when nothing is wrong."""
    trouble_reason: str = ""

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    """A node that carries pods of the job."""

    name: str
    ready: bool = True
    not_ready_since: datetime | None = None
    cordoned: bool = False
    out_of_service: bool = False
    doomed: str = ""
    """Why pods must leave it (a NoExecute or Spot taint, a health label), empty when they need not."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failing rank of a generation, as its agent reports it; global_rank -1: no worker, the start itself."""

    global_rank: int
    exitcode: int | None
    signal: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFact:
    """What is known of one agent.

    state and everything beside it come from its last answer. generation is None for an agent of another make, which
    does not say. last_answer is None while it never answered; trying_since is when the first call was made.
    step_at: when its newest step was first seen here. step_pace: time of one step.
    answering_since: the first answer after the last silence.
    """

    state: AgentState | None = None
    generation: int | None = None
    reason: str = ""
    message: str = ""
    drained: bool = False
    terminating: bool = False
    failure: Failure | None = None
    step: int | None = None
    step_at: datetime | None = None
    step_pace: timedelta | None = None
    trying_since: datetime | None = None
    last_answer: datetime | None = None
    answering_since: datetime | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Everything that one decision rests on."""

    now: datetime
    job: JobFact
    pods: tuple[PodFact, ...] = ()
    agents: dict[str, AgentFact] = field(default_factory=dict)
    """By pod name."""
    nodes: dict[str, NodeFact] = field(default_factory=dict)
    """By node name; a name that is missing is a node that was deleted."""
    refusal: str = ""
    """Why the API server refused to create the last pod (quota, admission), as one sentence."""
    listed_at: datetime | None = None
    """When the API server was last asked for the job's pods; None when the shell does not say."""
