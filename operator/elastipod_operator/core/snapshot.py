"""What the shell observed, as small frozen records. Times are aware UTC datetimes of the operator's own clock, unless said otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from ..api.models import CleanPodPolicy
from .names import PodId
from .queue_facts import QueueFact
from .reasons import NO_REASON, AnyReason, Reason, ReasonAndMessage
from .record import Record
from .sizes import Sizes

# Trouble of a pod that no scheduler has looked at.
NOT_CONSIDERED = Reason.NO_SCHEDULER


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
class SpecLimits:
    """One replicaSpec: its name, how many of its pods may train at most, and how many more are kept ready."""

    name: str
    limit: int
    spares: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the user requested: the spec with its defaults filled in. What a queue grants of it is a `Grant`."""

    sizes: Sizes
    specs: tuple[SpecLimits, ...]
    scaling_timeout: timedelta = timedelta(seconds=60)
    graceful_timeout: timedelta = timedelta(seconds=600)
    faulty_timeout: timedelta = timedelta(seconds=30)
    snooze: timedelta = timedelta(0)
    min_stable: timedelta = timedelta(0)
    backoff_base: timedelta = timedelta(seconds=10)
    backoff_max: timedelta = timedelta(seconds=300)
    max_retries: int | None = None
    eval_period: timedelta = timedelta(hours=1)
    restarts_before_full: int | None = None
    max_full_restarts: int | None = None
    max_offenders: int = 0
    payback: bool = True
    new_processes: bool = False
    """After a fault all workers get new processes, also where they could outlive it (recovery: Process)."""
    clean_pods: CleanPodPolicy = CleanPodPolicy.ALL
    ceiling: int = 0
    """spec.replicas: the most replicas that kubectl scale allows; 0 for no ceiling. The sizes are within it already."""
    ttl: timedelta | None = None
    is_ttl_zero: bool = False
    """ttlSecondsAfterFinished is 0, which means that the job is kept."""
    suspend: bool = False
    active_deadline: timedelta | None = None
    startup_deadline: timedelta | None = None
    fault_deadline: timedelta | None = None
    agent_port: int = 8080
    container: str = ""
    has_key: bool = True
    """New pods get a key of the job, when the operator has an install key."""
    warnings: tuple[str, ...] = ()
    """What in the spec does not do what it seems to, besides its sizes; sentences for the user."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of the job, as in status.conditions."""

    type: str
    status: bool
    reason: AnyReason
    message: str
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedJob:
    """The job as the API server shows it."""

    namespace: str
    name: str
    uid: str
    created_at: datetime
    """When this operator first saw it, or what an operator before wrote as its start: never the API server's own clock."""
    policy: Policy | None
    """None when the spec cannot be used; `spec_error` then says why in one sentence."""
    spec_error: str = ""
    record: Record | None = None
    has_foreign_record: bool = False
    """There are annotations of the operator's that were written for another object, or by hand; they are ignored."""
    was_reconciled: bool = True
    """An operator has looked at the job before, as its status tells."""
    unmanaged: str = ""
    """Why this operator must leave the job alone: a newer one wrote its record. Empty when it need not."""
    edit_error: str = ""
    """Why the spec as it stands cannot be used, in one sentence; the policy is that of the last one that could be."""
    warnings: tuple[tuple[AnyReason, str], ...] = ()
    """What in the object beside its spec does not do what it seems to: reasons and sentences."""
    pending_edits: tuple[str, ...] = ()
    """Fields of the spec that were edited and act only when the job is suspended and resumed."""
    history_generation: int = 0
    """The newest generation that the history tells of."""
    conditions: tuple[Condition, ...] = ()
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """status.elasticScalingStatus as it was last written."""
    has_finalizer: bool = False
    deleting_since: datetime | None = None
    """When this operator first saw that it is being deleted."""
    drain_on_delete: bool = False
    queue: str = ""
    """The queue that the job's label names (docs/design/queues.md)."""
    queue_in_template: str = ""
    start_time: datetime | None = None
    """status.startTime as it was last written."""


class ContainerState(StrEnum):
    """States of a container as they stand in a pod's status."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


@dataclass(frozen=True, slots=True)
class ObservedContainer:
    """A container as its kubelet reports it.

    exit_code: of its last run that ended, None before the first. reason: the kubelet's word for the present state.
    is_restarting: it has ended, and the kubelet starts it again.
    """

    state: ContainerState = ContainerState.WAITING
    exit_code: int | None = None
    reason: str = ""
    restart_count: int = 0
    is_restarting: bool = False

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""
        return self.state is ContainerState.TERMINATED and not self.is_restarting

    @property
    def has_run(self) -> bool:
        """Whether it runs or ever ran."""
        return self.state is not ContainerState.WAITING or self.restart_count > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """A pod of the job."""

    id: PodId
    name: str
    uid: str
    created_at: datetime
    """When this operator first saw it, as far as the store knows."""
    phase: str = "Pending"
    ip: str = ""
    node: str = ""
    started: bool = False
    """True once the agent's container runs."""
    container: ObservedContainer | None = None
    """The agent's container; None while its kubelet has not reported it."""
    containers_ended: bool = False
    """All its containers have ended for good. The phase says so too, but a little later."""
    deletion_grace: timedelta | None = None
    """What its deletion gives its containers; None while it is not being deleted."""
    kill_at: datetime | None = None
    """When the kubelet will kill what is left: the grace, from when this operator first saw the deletion."""
    disruption: str = ""
    """Reason of a true DisruptionTarget condition, empty when there is none."""
    problem: str = ""
    """Why it does not start or how it ended, as one sentence; empty when nothing is wrong."""
    problem_reason: AnyReason = NO_REASON
    problem_since: datetime | None = None
    """Since when there is trouble of this reason, as this operator saw it; None: not known."""
    key_secret: str = ""
    """The Secret from which its agent has the job's key; empty for none."""
    generation: int = 0
    """The job's generation when it was made, as its label says."""
    avoids: tuple[str, ...] = ()
    """Nodes that it was made to avoid."""
    workload: str = ""
    """The Workload on whose quota it was made."""

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """A node that carries pods of the job."""

    name: str
    ready: bool = True
    not_ready_since: datetime | None = None
    cordoned: bool = False
    out_of_service: bool = False
    disruption: str = ""
    """Why pods must leave it (a NoExecute or Spot taint, a health label), empty when they need not."""
    leaves_at: datetime | None = None
    """When it goes at the latest: what the notice gives, from when this operator first saw it; None: nothing says."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failing rank of a generation, as its agent reports it; global_rank -1: no worker, the start itself."""

    global_rank: int
    exitcode: int | None
    signal: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedAgent:
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
    connection_refused: bool = False
    authentication_failed: bool = False
    """It does not accept the operator's proof (401), or cannot prove itself."""
    warming: bool = False
    """Its workers would start slowly now: it is still loading what they will need."""
    restart_mode: str = ""
    """How its workers go on after a fault: in_process_restart, or what a failed one asked for; empty where it does not say."""
    saving: bool = False
    """All its workers know that they are to end, and are on their way: they save what the next ones go on from."""
    no_drain_handler: bool = False
    """None of its workers can know of the drain under way: none asks for events or handles their signal."""
    is_spare: bool = False
    """It was told that it is a spare, and waits for its turn."""
    refused_answer: str = ""
    """What of its answers is not taken, and why; a sentence. Empty where all is."""
    can_reach: bool = False
    """It can be asked whether it reaches another agent."""
    is_reached: bool | None = None
    """Whether other agents of the job reach it, as they said at `peers_asked_at`; None where none could tell."""
    peers_asked_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorkload:
    """A Workload of Kueue's that the job owns: number 0 is the base, others are increments.

    counts: pods by spec. reserved, admitted: conditions of these names. evicted: Kueue's reason, while it wants the quota
    back (Evicted and QuotaReserved are both true); eviction_message is its sentence. waits: why it is not admitted.
    admitted_at: since when it is. pods_ready: None where the condition was never written. is_active: spec.active.
    is_outdated: it asks for pods of other templates than those that pods are made from now. priority, class_kind and
    class_name: as in its spec. has_outdated_priority: the job wishes another priority or class; is_priority_fixed: Kueue refuses that
    while quota is reserved.
    """

    name: str
    uid: str
    number: int
    counts: tuple[tuple[str, int], ...]
    created_at: datetime
    queue: str = ""
    reserved: bool = False
    admitted: bool = False
    admitted_at: datetime | None = None
    eviction_reason: AnyReason = NO_REASON
    eviction_message: str = ""
    evicted_at: datetime | None = None
    pending_message: str = ""
    pods_ready: bool | None = None
    finished: bool = False
    is_active: bool = True
    is_outdated: bool = False
    is_deleting: bool = False
    priority: int = 0
    class_kind: str = ""
    class_name: str = ""
    has_outdated_priority: bool = False
    is_priority_fixed: bool = False

    @property
    def is_granted(self) -> bool:
        """Whether pods may run on it: admitted, and neither called back nor over."""
        return self.admitted and not (self.eviction_reason or self.finished or self.is_deleting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that one decision rests on."""

    now: datetime
    job: ObservedJob
    pods: tuple[ObservedPod, ...] = ()
    agents: dict[str, ObservedAgent] = field(default_factory=dict)
    """By pod name."""
    nodes: dict[str, ObservedNode] = field(default_factory=dict)
    """By node name; a name that is missing is a node that was deleted."""
    pod_creation_error: str = ""
    """Why the API server refused to create the last pod (quota, admission), as one sentence."""
    pod_creation_retry_at: datetime | None = None
    """Until when no further pod is asked for after that."""
    pods_listed_at: datetime | None = None
    """When the API server was last asked for the job's pods; None when the shell does not say."""
    capacity_freed_at: datetime | None = None
    """When a node was last found fit for pods, or another job ended: there may be more room than before."""
    workloads: tuple[ObservedWorkload, ...] = ()
    default_queue: bool | None = None
    """Whether there is a LocalQueue `default` in the job's namespace; None: not asked."""
    queue_problem: ReasonAndMessage | None = None
    """Reason and sentence why the last call for quota came to nothing."""
    queue_fact: QueueFact | None = None
    """The job's queue as it was last read; None: not known."""
    operator_error: str = ""
    """Why the last pass over the job failed by a mistake of the operator's own; a sentence."""
    pod_deletion_error: str = ""
    """Why the API server refuses to delete pods that are to go; a sentence."""
    quota_return_error: str = ""
    """Why quota could not be given back, or of a deleted job not be looked for, when that was last tried; a sentence."""
