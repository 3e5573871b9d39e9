"""The status of a HyperPodPyTorchJob: exactly the fields that the ecosystem's clients know.

The `hyp` client rejects a whole listing if one object has an unknown field, or a number where it expects a string.
Everything else that the operator reports goes into annotations, Events and metrics.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from elastipod_operator.api.base import Model, Timestamp

# Entries of maps, for the scale subresource. No spec can be named like the first.
RUNNING = "Running"
SELECTOR = "selector"


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class RestartType(StrEnum):
    """How far a restart reaches: the processes in their pods, or all pods of the job."""

    PROCESS_LEVEL = "PLR"
    JOB_LEVEL = "JLR"


class JobCondition(Model):
    """A condition of the job; the last one of the list is its present state."""

    type: str
    """Created, Suspended, PodsRunning, Running, Faulted, Completed, Failed; before them Scaling, PodsReady, Warning."""

    status: ConditionStatus
    """True, False or Unknown."""

    reason: str | None = None
    """The reason, one CamelCase word."""

    message: str | None = None
    """The reason as a sentence, with what to do."""

    last_transition_time: Timestamp | None = None
    """When the status last changed."""

    last_probe_time: Timestamp | None = None
    """When the condition was last checked."""


class ObjectReference(Model):
    """A reference to another object."""

    api_version: str | None = None
    field_path: str | None = None
    kind: str | None = None
    name: str | None = None
    namespace: str | None = None
    resource_version: str | None = None
    uid: str | None = None


class RestartStatus(Model):
    """Restarts counted in the present window; clients need all three numbers."""

    current_eval_period: int = 0
    """Number of the window, from 0."""

    full_job_restart_count: int = 0
    """Full job restarts in the window."""

    restart_count: int = 0
    """Process-level restarts in the window since the last full job restart."""


class FaultyPods(Model):
    """What the latest fault hit."""

    restart_type: RestartType | None = None
    """PLR (processes) or JLR (whole job)."""

    faulty_instance_id_list: tuple[str, ...] = ()
    """Nodes."""

    faulty_pod_list: tuple[str, ...] = ()
    """Pods."""

    faulty_rank_list: tuple[str, ...] = ()
    """Group ranks."""


class ElasticScalingStatus(Model):
    """The target size and its progress."""

    target_replicas: dict[str, int] = Field(default_factory=dict)
    """Target number of replicas of each spec, by name; under `Running` the number that train, of all specs together."""

    last_updated: Timestamp | None = None
    """When another field of this object last changed."""

    last_scaling_time: Timestamp | None = None
    """When the workers were last running again after a planned change of size."""

    last_restart_time: Timestamp | None = None
    """When the workers were last running again after a fault."""

    pods_scaled: bool | None = None
    """The pods of the target exist."""

    is_faulty_pod_scale_down: bool | None = None
    """The latest change of size was a shrink after a fault."""

    consecutive_scaling_failures: int | None = None
    """Number of failed resizes since the last successful one."""


class PodSet(Model):
    """One group of pods as the queue sees it."""

    name: str | None = None
    count: int = 1
    min_count: int | None = None
    template: dict[str, Any] = Field(default_factory=dict)


class PodSetInfo(Model):
    """Additions of the queue to the pods of one group."""

    annotations: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    node_selector: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()


class JobStatus(Model):
    """What the operator reports."""

    start_time: Timestamp | None = None
    """When the job was accepted; in a queue, when it was admitted for the first time."""

    completion_time: Timestamp | None = None
    """When the job ended."""

    conditions: tuple[JobCondition, ...] = ()
    """Conditions of the job; the last one is its present state."""

    restart_count: int = 0
    """Recoveries so far."""

    restart_status: RestartStatus | None = None
    """Restarts in the present window of the restart policy."""

    master_addr: str | None = None
    """Address of global rank 0."""

    master_port: str | None = None
    """Port of global rank 0, as a string."""

    job_pods: tuple[ObjectReference, ...] = ()
    """The job's pods."""

    manager_pods: ObjectReference | None = None
    """Not used by Elastipod."""

    pod_manager_statuses: tuple[ObjectReference, ...] = ()
    """Not used by Elastipod."""

    pod_sets: tuple[PodSet, ...] = ()
    """Not used by Elastipod: the job's Workloads say it."""

    pod_set_infos: tuple[PodSetInfo, ...] = ()
    """Not used by Elastipod."""

    elastic_workload_ref: dict[str, str] | None = None
    """Entry `selector`: the label selector of the job's pods and Workloads."""

    latest_faulty_pod_instance_list: FaultyPods | None = None
    """What the latest fault hit."""

    elastic_scaling_status: ElasticScalingStatus | None = None
    """The target size and its progress."""
