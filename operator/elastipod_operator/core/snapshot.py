"""What the shell observed, as frozen dataclasses. Times are aware UTC datetimes of the operator's clock unless stated otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from .clean_pod_policy import CleanPodPolicy
from .growth_mode import GrowthMode
from .names import PodId
from .queue_facts import QueueFact
from .reasons import NO_REASON, AnyReason, Reason, ReasonAndMessage
from .record import Record
from .sizes import Sizes

# The problem of a pod that no scheduler has considered.
NOT_CONSIDERED = Reason.NO_SCHEDULER


class AgentState(StrEnum):
    """States of an agent, as on the wire (HyperPod agent protocol)."""

    INIT = "init"
    READY = "ready"
    RUNNING = "running"
    COMPLETED = "completed"
    FAULTED = "faulted"
    STOPPING = "stopping"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class SpecLimits:
    """One replicaSpec: its name, how many of its pods may train, and how many more are kept as spares."""

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
    growth: GrowthMode = GrowthMode.NEXT_INCREMENT
    new_processes: bool = False
    """Every change gives all workers new processes, even if they could survive it (recovery: Process)."""
    expects_memory: bool = False
    """The user expects workers to keep their state in memory (recovery: InMemory), and is warned if they do not."""
    clean_pods: CleanPodPolicy = CleanPodPolicy.ALL
    ceiling: int = 0
    """spec.replicas, the maximum that kubectl scale sets; 0 for none. The sizes respect it already."""
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
    """New pods get a key of the job if the operator has an install key."""
    warnings: tuple[str, ...] = ()
    """Fields of the spec, except sizes, that do not have the effect that they seem to have; sentences for the user."""


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
    """When this operator first saw it, or the start that an earlier operator recorded: never a time of the API server."""
    policy: Policy | None
    """None when the spec cannot be used; `spec_error` then says why in one sentence."""
    spec_error: str = ""
    record: Record | None = None
    has_foreign_record: bool = False
    """Its annotations of the operator were written for another object or by hand; they are ignored."""
    was_reconciled: bool = True
    """An operator has reconciled the job before: it has a status."""
    unmanaged: str = ""
    """Why this operator must not manage the job: a newer one wrote its record. Empty otherwise."""
    edit_error: str = ""
    """Why the present spec is invalid, in one sentence; `policy` then follows the last valid spec. Empty otherwise."""
    warnings: tuple[tuple[AnyReason, str], ...] = ()
    """Parts of the object beside its spec that do not have the effect that they seem to have: reasons and sentences."""
    pending_edits: tuple[str, ...] = ()
    """Edited fields of the spec that take effect when the job is suspended and resumed."""
    history_generation: int = 0
    """The newest generation in the history."""
    conditions: tuple[Condition, ...] = ()
    scaling: Mapping[str, Any] = field(default_factory=dict)
    """status.elasticScalingStatus as it was last written."""
    has_finalizer: bool = False
    deleting_since: datetime | None = None
    """When this operator first saw its deletion."""
    drain_on_delete: bool = False
    queue: str = ""
    """The queue that the job's label names (docs/design/queues.md)."""
    queue_in_template: str = ""
    start_time: datetime | None = None
    """status.startTime as it was last written."""


class ContainerState(StrEnum):
    """States of a container in a pod's status."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


@dataclass(frozen=True, slots=True)
class ObservedContainer:
    """A container as its kubelet reports it.

    exit_code: of the last run that ended; None before that. reason: the kubelet's reason for the present state.
    is_restarting: it has ended, and the kubelet restarts it.
    """

    state: ContainerState = ContainerState.WAITING
    exit_code: int | None = None
    reason: str = ""
    restart_count: int = 0
    is_restarting: bool = False

    @property
    def ended(self) -> bool:
        """Whether it has ended and is not restarted."""
        return self.state is ContainerState.TERMINATED and not self.is_restarting

    @property
    def has_run(self) -> bool:
        """Whether it runs or has run."""
        return self.state is not ContainerState.WAITING or self.restart_count > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedPod:
    """A pod of the job."""

    id: PodId
    name: str
    uid: str
    created_at: datetime
    """When this operator first saw it."""
    considered_at: datetime | None = None
    """When this operator first saw that a scheduler had considered it; None if none has."""
    phase: str = "Pending"
    ip: str = ""
    node: str = ""
    started: bool = False
    """The agent's container runs."""
    container: ObservedContainer | None = None
    """The agent's container; None until its kubelet reports it."""
    containers_ended: bool = False
    """All its containers have ended for good. Its phase follows a little later."""
    deletion_grace: timedelta | None = None
    """The grace period of its deletion; None while it is not being deleted."""
    kill_at: datetime | None = None
    """When the kubelet kills its containers: the grace period after this operator first saw the deletion."""
    disruption: str = ""
    """Reason of a true DisruptionTarget condition, empty when there is none."""
    problem: str = ""
    """Why it does not start or how it ended, in one sentence; empty when nothing is wrong."""
    problem_reason: AnyReason = NO_REASON
    problem_since: datetime | None = None
    """When this operator first saw a problem with this reason; None if unknown."""
    key_secret: str = ""
    """The Secret that holds the job's key for its agent; empty for none."""
    agent_port: int | None = None
    """The port at which its agent was told to listen; None if the pod does not say: then it is the job's."""
    agent_container: str = ""
    """The container that runs its agent; empty if unknown."""
    generation: int = 0
    """The job's generation when the pod was created, from its label."""
    avoids: tuple[str, ...] = ()
    """The nodes that its affinity excludes."""
    only_on: tuple[str, ...] = ()
    """Host names of the nodes to which its affinity restricts it, because it may use spare capacity only; empty: any node."""
    failures_before: int | None = None
    """How many pods of its slot in a row have failed before it without training; None if it does not say."""
    workload: str = ""
    """The Workload on whose quota it runs."""
    tolerations: tuple[str, ...] = ()
    """Those that let it stay for good despite a taint with the effect NoExecute, as JSON. A Kueue flavor may have added some."""

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")


def pod_agent_port(pod: ObservedPod, policy: Policy) -> int:
    """Give the port of a pod's agent, which an edit of the job does not move."""
    return policy.agent_port if pod.agent_port is None else pod.agent_port


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """A node that carries pods of the job."""

    name: str
    ready: bool = True
    not_ready_since: datetime | None = None
    cordoned: bool = False
    out_of_service: bool = False
    disruption: str = ""
    """Why pods must leave it (a NoExecute or Spot taint, a health label); empty when they need not."""
    seen_since: datetime | None = None
    """When this operator first saw it; None if unknown."""
    leaves_at: datetime | None = None
    """The latest end of the node: the time that the notice gives, from when this operator first saw it; None if unknown."""
    closed: str = ""
    """What it announces that must keep new pods away but that the scheduler does not heed; empty if nothing."""


class Preparation(StrEnum):
    """How far workers are that an agent started ahead of their first generation, as on the wire."""

    BEGUN = "begun"
    READY = "ready"  # they wait at the barrier
    FAILED = "failed"  # they have ended; the next start starts others


REPLICATED, SHARDED = "replicated", "sharded"  # ObservedAgent.memory_state


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failing rank of a generation, as its agent reports it. global_rank -1: the start failed before any worker ran."""

    global_rank: int
    exitcode: int | None
    signal: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedAgent:
    """What is known of one agent.

    state and most other fields come from its last answer. generation: None for agents that do not report it. last_answer: None
    until it has answered. trying_since: when the first call was made. step_at: when its newest step was first seen here.
    total_steps: of the whole job, if the workers report it. step_pace: time of one step. answering_since: the first answer after
    the last silence; an agent that stopped its workers before a silence, and still does, has answered since before it.
    """

    state: AgentState | None = None
    generation: int | None = None
    reason: str = ""
    message: str = ""
    drained: bool = False
    terminating: bool = False
    failure: Failure | None = None
    step: int | None = None
    total_steps: int | None = None
    step_at: datetime | None = None
    step_pace: timedelta | None = None
    trying_since: datetime | None = None
    last_answer: datetime | None = None
    answering_since: datetime | None = None
    connection_refused: bool = False
    authentication_failed: bool = False
    """It rejects the operator's credentials (401), or the operator rejects its own."""
    warming: bool = False
    """Its workers would start slowly now: its fork server is still importing modules."""
    restart_mode: str = ""
    """How its workers restart after a fault: in_process_restart, or what a failed worker requested; empty if not reported."""
    saving: bool = False
    """All its workers have acknowledged the drain and save their checkpoint."""
    no_drain_handler: bool = False
    """None of its workers can notice the present drain: none polls for events or handles the signal."""
    is_spare: bool = False
    """It is assigned as a spare."""
    refused_answer: str = ""
    """Which part of its answer is rejected and why, in one sentence; empty for none."""
    memory_state: str = ""
    """How its workers keep the training state in memory beyond a generation: replicated or sharded; empty if they do not."""
    num_kept: int | None = None
    """How many of their processes survived the last generation; None during one, and if it does not say."""
    gap: timedelta | None = None
    """The time between the last step that its workers made before the present generation and their first one in it, if known."""
    steps_repeated: int = 0
    """How many steps, from that first one on, its workers had made before; known along with the gap."""
    can_prepare: bool = False
    """It can start workers ahead of their first generation."""
    preparation: Preparation | None = None
    """How far such workers are; None without any."""
    can_reach: bool = False
    """It can check whether it reaches another agent."""
    can_serve_store: bool = False
    """It can serve the store at which workers meet, and its own workers can use the store of another agent."""
    can_begin_next: bool = False
    """It can begin the generation after a drain by itself."""
    next_generation: int | None = None
    """The generation that it will begin once its workers have drained; None for none."""
    generation_at: datetime | None = None
    """When its present generation was first seen here."""
    is_reached: bool | None = None
    """Whether other agents of the job reach it, as of `peers_asked_at`; None if unknown."""
    peers_asked_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorkload:
    """A Kueue Workload that the job owns: number 0 is the base, others are increments.

    counts: pods by spec. reserved, admitted: conditions of these names. eviction_reason, eviction_message: set while Kueue
    evicts it and its quota is still reserved. pending_message: why it is not admitted. pods_ready: None if the condition was never
    written. is_active: spec.active. is_outdated: its pod templates differ from those of new pods. priority, class_kind,
    class_name: as in its spec. has_outdated_priority: the job requests another priority or class. is_priority_fixed: Kueue
    rejects that change while quota is reserved.
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
        """Whether pods may run on it: admitted, and neither evicted nor finished."""
        return self.admitted and not (self.eviction_reason or self.finished or self.is_deleting)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpareCapacity:
    """Room for more pods of a job on nodes that exist, as far as requests, labels and taints tell.

    places: pods that fit, by the host name of the node. placed: the job's pods that had a node at that time, by name. problem: why
    the nodes could not be read, in one sentence; empty if they could. avoids: nodes that were left out because of repeated faults.
    """

    read_at: datetime
    places: Mapping[str, int] = field(default_factory=dict)
    placed: frozenset[str] = frozenset()
    problem: str = ""
    avoids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything that one decision rests on."""

    now: datetime
    job: ObservedJob
    pods: tuple[ObservedPod, ...] = ()
    agents: dict[str, ObservedAgent] = field(default_factory=dict)
    """By pod name."""
    nodes: dict[str, ObservedNode] = field(default_factory=dict)
    """By node name; a missing name means that the node was deleted."""
    closed_nodes: Mapping[str, str] = field(default_factory=dict)
    """Nodes of the cluster that new pods must keep away from, although the scheduler does not know it, and what they announce."""
    pod_creation_error: str = ""
    """Why the API server refused to create the last pod (quota, admission), in one sentence; empty if it did not."""
    pod_creation_retry_at: datetime | None = None
    """When the operator may try again after that."""
    pods_listed_at: datetime | None = None
    """When the job's pods were last listed; None if unknown."""
    capacity_freed_at: datetime | None = None
    """When a node last became schedulable or another job ended, so that there may be more room."""
    spare_capacity: SpareCapacity | None = None
    """Read only for jobs that grow on spare capacity; None before that."""
    workloads: tuple[ObservedWorkload, ...] = ()
    default_queue: bool | None = None
    """Whether there is a LocalQueue `default` in the job's namespace; None if not checked."""
    queue_problem: ReasonAndMessage | None = None
    """Why the last request for quota failed."""
    queue_fact: QueueFact | None = None
    """The job's queue as last read; None if unknown."""
    operator_error: str = ""
    """The error in the operator that made the last reconcile pass of the job fail, in one sentence."""
    pod_deletion_error: str = ""
    """Why the API server refuses to delete pods, in one sentence."""
    quota_return_error: str = ""
    """Why the last attempt to return quota, or to list the Workloads of a deleted job, failed; one sentence."""
