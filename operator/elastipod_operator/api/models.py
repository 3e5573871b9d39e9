"""The spec of a HyperPodPyTorchJob as pydantic models: the one source of the CRD and of the API reference.

Rules that need no arithmetic across the whole job are checked here and, in the same words, by the API server (`rules`);
the sizes of a job are computed in the core.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, field_validator, model_validator

from elastipod_operator.api.base import (
    MAX_INT32,
    Count,
    Model,
    Port,
    PositiveCount,
    PositiveSeconds,
    RestartLimit,
    Seconds,
)
from elastipod_operator.api.explain import field_error, value_error
from elastipod_operator.api.job_status import JobStatus
from elastipod_operator.api.pattern_check import check_compile_time
from elastipod_operator.core.clean_pod_policy import CleanPodPolicy as CleanPodPolicy
from elastipod_operator.core.growth_mode import GrowthMode
from elastipod_operator.core.names import API_VERSION, KIND

NPROC_PATTERN = r"^(auto|cpu|gpu|[1-9][0-9]{0,3})$"
DNS_LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
MAX_REPLICA_SPECS = 2
MAX_DISCRETE_VALUES = 1024
MAX_LOG_RULES = 64
MAX_PATTERN = 4096

DnsLabel = Annotated[str, StringConstraints(min_length=1, max_length=63)]


class ThresholdOperator(StrEnum):
    """How a logged metric is compared with its threshold."""

    GT = "gt"
    LT = "lt"
    EQ = "eq"
    GTEQ = "gteq"
    LTEQ = "lteq"


class Switch(StrEnum):
    """Let the operator decide, or turn the feature off."""

    AUTO = "Auto"
    OFF = "Off"


class Recovery(StrEnum):
    """How workers restart after a fault."""

    AUTO = "Auto"
    PROCESS = "Process"
    IN_MEMORY = "InMemory"


class LogRule(Model):
    """One rule that watches the log of each worker of local rank 0."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=63)]
    """Name of the rule; it appears in the reason of a fault, for example LogHang_<name>."""

    log_pattern: Annotated[str, StringConstraints(min_length=1, max_length=MAX_PATTERN)]
    """Regular expression (Python syntax) searched in each line; its first capture group holds the metric."""

    expected_start_cut_off_in_seconds: Seconds | None = None
    """The first match must occur within this time after the start of the workers; otherwise they count as hung."""

    expected_recurring_frequency_in_seconds: Seconds | None = None
    """Each further match must occur within this time after the previous one; otherwise the workers count as hung."""

    stop_pattern: Annotated[str, StringConstraints(max_length=MAX_PATTERN)] | None = None
    """The rule ends for the present generation when a line matches this regular expression."""

    metric_threshold: float | None = None
    """The number with which the captured metric is compared."""

    operator: ThresholdOperator | None = None
    """The comparison of metric and threshold that indicates a problem: gt, lt, eq, gteq or lteq."""

    metric_evaluation_data_points: PositiveCount = 1
    """Number of consecutive matches beyond the threshold after which the workers count as slow. Absent: 1."""

    fault_on_match: bool | None = None
    """A match alone is a fault."""

    @field_validator("log_pattern", "stop_pattern")
    @classmethod
    def _is_a_regex(cls, pattern: str | None) -> str | None:
        try:
            check_compile_time(pattern or "")
            re.compile(pattern or "")
        except (re.error, OverflowError, RecursionError, ValueError) as error:
            raise value_error(f"it must be a regular expression ({error})") from error
        return pattern


class RestartPolicy(Model):
    """How many restarts are allowed, and what happens when they are used up."""

    eval_period_seconds: PositiveSeconds = 3600
    """Restarts are counted in windows of this length."""

    num_restart_before_full_job_restart: RestartLimit | None = None
    """Number of process-level restarts allowed in a window; the next one recreates all pods. Absent: no limit."""

    max_full_job_restarts: RestartLimit | None = None
    """Number of full job restarts allowed in a window; the next one fails the job. Absent: no limit."""

    max_num_repeat_offenders_to_avoid: Count = 0
    """Maximum number of nodes with repeated faults that new pods avoid."""

    scale_up_snooze_time_in_seconds: Seconds = 0
    """Time to wait before growing after a recovery."""


class RunPolicy(Model):
    """The life cycle of the job."""

    active_deadline_seconds: PositiveSeconds | None = None
    """The job fails after it has been active for this time; suspended time does not count. Absent: no limit."""

    startup_deadline_seconds: PositiveSeconds | None = None
    """The job fails if training has not begun within this time after its pods were created. Absent: no limit."""

    fault_deadline_seconds: PositiveSeconds | None = None
    """The job fails if training has not resumed within this time after a fault. Absent: no limit."""

    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.ALL
    """Which pods are deleted when the job has ended: All, Running (unfinished ones), OnlyComplete (all, if the job completed) or None."""

    job_max_retry_count: RestartLimit | None = None
    """Number of worker faults from which the job recovers; the next one fails the job. Absent: no limit.
    Lost nodes, evictions and resizes do not count."""

    suspend: bool = False
    """True drains the job and deletes its pods; false resumes it."""

    ttl_seconds_after_finished: Annotated[int, Field(ge=-(2**31), le=MAX_INT32)] | None = None
    """Time after the end of the job at which it is deleted. Absent, 0 or negative: keep it."""

    workload_mode: Annotated[str, StringConstraints(max_length=63)] | None = None
    """Accepted for compatibility; pods are managed directly in every mode."""

    log_monitoring_configuration: Annotated[tuple[LogRule, ...], Field(max_length=MAX_LOG_RULES)] = ()
    """Rules that detect hung, slow or faulty workers from their logs."""

    restart_policy: RestartPolicy = RestartPolicy()
    """How many restarts are allowed."""


class ElasticPolicy(Model):
    """The sizes at which the job may train, and the time-outs of resizes."""

    min_replicas: Count | None = None
    """Minimum number of replicas that train. Absent: the sum of replicas, at least 1."""

    max_replicas: Count | None = None
    """Maximum number of replicas that train. Absent: the sum of replicaSpecs' maxReplicas (where absent: of replicas)."""

    replica_increment_step: PositiveCount | None = None
    """Sizes are minReplicas plus multiples of this step. Absent: 1. Ignored if replicaDiscreteValues is set."""

    replica_discrete_values: Annotated[tuple[PositiveCount, ...], Field(max_length=MAX_DISCRETE_VALUES)] = ()
    """The allowed sizes; those outside minReplicas to maxReplicas are ignored."""

    scaling_timeout_in_seconds: Seconds = 60
    """Time to wait for more replicas after the first increment is ready."""

    graceful_shutdown_timeout_in_seconds: Seconds = 600
    """Time for workers to save a checkpoint when the size changes; after that they are stopped."""

    faulty_scale_down_timeout_in_seconds: Seconds = 30
    """Time to wait for replacements of lost replicas before continuing with fewer replicas. Workers that keep the whole state in
    memory continue with fewer at once; replacements that are ready in this time join them without scalingTimeoutInSeconds."""

    @model_validator(mode="after")
    def _some_size_is_left(self) -> Self:
        low, high, values = self.min_replicas, self.max_replicas, self.replica_discrete_values
        if low is not None and high is not None and low > high:
            raise field_error(f"minReplicas is {low} but maxReplicas is {high}; raise maxReplicas or lower minReplicas")
        if values and not any((low or 0) <= value and (high is None or value <= high) for value in values):
            raise field_error(
                "replicaDiscreteValues holds no size between minReplicas and maxReplicas; "
                "add one, or change minReplicas or maxReplicas"
            )
        return self


class ReplicaSpec(Model):
    """A group of pods that are created from one template."""

    name: DnsLabel
    """Name of the group; part of the names of its pods."""

    replicas: Count = 0
    """Number of pods at the first start. Absent: 0."""

    max_replicas: Count | None = None
    """Maximum number of pods of this group. Absent: replicas, or the remainder of elasticPolicy.maxReplicas."""

    spares: Count = 0
    """Number of additional pods that are kept ready; one of them replaces a lost pod at once. Absent: 0."""

    template: dict[str, Any]
    """Template of the pods. Name and namespace in its metadata are accepted and ignored."""

    @field_validator("name")
    @classmethod
    def _is_a_dns_label(cls, name: str) -> str:
        if not re.fullmatch(DNS_LABEL_PATTERN, name):
            raise value_error("it must be lower-case letters, digits and '-', and begin and end with a letter or digit")
        return name


class Backoff(Model):
    """Back-off after failed resizes: doubled each time, with jitter."""

    base_seconds: PositiveSeconds = 10
    """The wait after the first failure."""

    max_seconds: PositiveSeconds = 600
    """The longest wait."""


class ElastipodOptions(Model):
    """Settings of Elastipod; other operators of this resource do not know them."""

    min_stable_seconds: Seconds = 30
    """Minimum time between planned resizes."""

    backoff: Backoff = Backoff()
    """Back-off of growth after failed resizes."""

    payback: Switch = Switch.AUTO
    """Auto postpones growth that would cost more time than it saves; Off always grows."""

    growth: GrowthMode = GrowthMode.NEXT_INCREMENT
    """How many pods beyond `replicas` are requested before there is room for them; each pending pod makes an autoscaler add nodes.
    NextIncrement: those of the next allowed size. SpareCapacityOnly: none; the job grows on nodes that exist. Maximum: all at once."""

    recovery: Recovery = Recovery.AUTO
    """How workers live through resizes and faults. Auto: in memory if all of them can, else as new processes from a checkpoint.
    Process: always as new processes. InMemory: as Auto, with a warning while the workers keep nothing in memory."""

    authentication: Switch = Switch.AUTO
    """Auto gives new pods a key of the job if the operator has an install key; Off never does."""

    graceful_shutdown_timeout_in_seconds: Seconds | None = None
    """Time for workers to save a checkpoint, also in jobs without elasticPolicy; overrides the field of the same name there."""

    agent_port: Port | None = None
    """Port of the agent in new pods; an edit moves no agent that runs. A container port named agent takes precedence. Absent: 8080."""

    container: DnsLabel | None = None
    """The container that runs the agent. Absent: the first one. An edit takes effect with edits of the templates."""

    parallelism: PositiveCount = 1
    """Ranks of one model group, which hold the weights once between them (tensor x pipeline x context parallel x HSDP shard).
    Only sizes whose ranks form whole groups are used."""


class JobSpec(Model):
    """The desired state of the job."""

    nproc_per_node: str = "auto"
    """Workers in each pod: auto, cpu, gpu, or a number written as a string."""

    replicas: Count = 0
    """Ceiling on the size, set by `kubectl scale`; 0 means none."""

    replica_specs: Annotated[tuple[ReplicaSpec, ...], Field(min_length=1, max_length=MAX_REPLICA_SPECS)]
    """The groups of pods. Usually one; with two, the first is a base that is always kept and the second is elastic."""

    elastic_policy: ElasticPolicy | None = None
    """How the size may change. Absent: the size is fixed."""

    run_policy: RunPolicy = RunPolicy()
    """Deadlines, restarts, suspension, and what happens at the end."""

    elastipod: ElastipodOptions = ElastipodOptions()
    """Elastipod's own settings."""

    @field_validator("nproc_per_node")
    @classmethod
    def _is_a_worker_count(cls, value: str) -> str:
        if not re.fullmatch(NPROC_PATTERN, value):
            raise value_error("it must be auto, cpu, gpu or a positive number up to 9999")
        return value

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [spec.name for spec in self.replica_specs]
        if len(set(names)) < len(names):
            raise field_error(f"replicaSpecs has two specs named {names[0]}; give each its own name")
        return self


class HyperPodPyTorchJob(Model):
    """A whole object as the API server gives it: `HyperPodPyTorchJob.model_validate(body)`.

    Raises pydantic's ValidationError, which `explain` turns into one sentence for the user.
    """

    api_version: str = API_VERSION
    kind: str = KIND
    spec: JobSpec
    status: JobStatus = JobStatus()
