"""Counters and gauges for Prometheus; labels are bounded."""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from .core.depth_reasons import DepthReason
from .job_collector import JobCollector

STATES = ("Created", "Suspended", "PodsRunning", "Running", "Faulted", "Completed", "Failed")
JOBS = Gauge("elastipod_jobs", "Jobs known to this operator", ["state"])
LIFECYCLE = Counter("elastipod_job_lifecycle_total", "Jobs that were created, completed, failed or deleted", ["event"])
for _event in ("created", "completed", "failed", "deleted"):
    LIFECYCLE.labels(_event)  # exported as 0: the increase of a series that begins with 1 is none to Prometheus
JOBS_IN_PHASE = Gauge("elastipod_jobs_in_phase", "Jobs by present phase", ["phase"])
PHASE_SECONDS = Histogram(
    "elastipod_phase_seconds",
    "Time of all jobs by phase, booked when a phase ends; depth: of the resize or recovery that it belongs to, if any",
    ["phase", "depth"],
    buckets=(0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 100000),
)
LEADING = Gauge("elastipod_leading", "1 for the operator that leads, 0 for one on standby")
# Exported by the leader only, because 0 would be wrong for an operator on standby.
GOODPUT = Gauge(
    "elastipod_goodput_ratio",
    "Share of training in the time of the existing jobs, without time in queues",
    registry=None,
)
GENERATIONS = Counter("elastipod_generations_total", "Starts of workers", ["kind"])
CHANGES = Counter(
    "elastipod_changes_total",
    "Resizes and recoveries by depth (memory, process, pod, job) and the reason why it is no less deep",
    ["kind", "depth", "reason"],
)
GENERATIONS.labels("recovery")  # as above
GAP_SECONDS = Histogram(
    "elastipod_gap_seconds",
    "Time from the last step before a resize or recovery to the first one after it, as workers that made both reported it",
    ["kind", "depth"],
    buckets=(0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 30, 100, 300),
)
for _depth in ("memory", "process", "pod", "job"):
    GAP_SECONDS.labels("recovery", _depth)  # as above
    PHASE_SECONDS.labels("detecting", _depth)
for _reason in DepthReason:
    for _depth in _reason.depths:
        CHANGES.labels("recovery", _depth, _reason.value)
        CHANGES.labels("resize", _depth, _reason.value)
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
RECONCILE_SECONDS = Histogram(
    "elastipod_reconcile_seconds",
    "Time of one reconcile pass, with its reads, writes of the job and calls to agents; without creating and deleting pods",
    buckets=_SECONDS,
)
DECISION_SECONDS = Histogram(
    "elastipod_decision_seconds", "Time of one decision, without any read, write or call", buckets=_SECONDS
)
API_SECONDS = Histogram(
    "elastipod_api_write_seconds", "Time of one write to the API server", ["what"], buckets=_SECONDS
)
POD_ORDER_SECONDS = Histogram(
    "elastipod_pod_order_seconds",
    "Time from the decision to create or delete a pod to the response of the API server, with the wait in the queue",
    buckets=_SECONDS,
)
API_CALLS = Counter("elastipod_api_writes_total", "Writes to the API server", ["what", "outcome"])
OPERATOR_ERRORS = Counter(
    "elastipod_operator_errors_total",
    "Errors in the operator itself, by what failed: a pass, calls for pods, handling a failure, a task, or reading an object",
    ["what"],
)
FAILED_PARTS = ("pass", "pods", "handling", "task", "object")
for _part in FAILED_PARTS:
    OPERATOR_ERRORS.labels(_part)  # as above
AGENT_FAILURES = Counter("elastipod_agent_call_failures_total", "Calls to agents that failed")
QUOTA_WAIT_SECONDS = Histogram(
    "elastipod_quota_wait_seconds",
    "Time until Kueue admitted a Workload, as observed by this operator",
    ["share"],
    buckets=(1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000),
)
EVICTIONS = Counter("elastipod_quota_evictions_total", "Workloads that Kueue evicted", ["share", "cause"])
EVICTION_CAUSES = (
    "Preempted", "PodsReadyTimeout", "AdmissionCheck", "ClusterQueueStopped", "LocalQueueStopped", "NodeFailures", "Deactivated",
)  # fmt: skip
for _cause in (*EVICTION_CAUSES, "Other"):
    EVICTIONS.labels("base", _cause)  # as above
    EVICTIONS.labels("increment", _cause)
EVICTIONS_LATE = Gauge("elastipod_quota_evictions_overdue", "Evicted Workloads whose quota is overdue", registry=None)
EACH_JOB = JobCollector()


def export_leading() -> None:
    """Export the metrics that only the leader has; safe to repeat."""
    for collector in (GOODPUT, EVICTIONS_LATE, EACH_JOB):
        with suppress(ValueError):  # exported already
            REGISTRY.register(collector)


def eviction_cause(reason: str) -> str:
    """Map a reason of Kueue to one of a few causes."""
    return next((cause for cause in EVICTION_CAUSES if reason.startswith(cause)), "Other")
