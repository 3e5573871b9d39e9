"""Counters and gauges for Prometheus; labels are bounded."""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

STATES = ("Created", "Suspended", "PodsRunning", "Running", "Faulted", "Completed", "Failed")
JOBS = Gauge("elastipod_jobs", "Jobs known to this operator", ["state"])
JOBS_IN_PHASE = Gauge("elastipod_jobs_in_phase", "Jobs by what they do, or wait for, now", ["phase"])
PHASE_SECONDS = Counter(
    "elastipod_phase_seconds_total", "Time of all jobs by what they did, booked when a job changes its phase", ["phase"]
)
# Only who looks after jobs exports it: of an operator that stands by, 0 would be wrong.
GOODPUT = Gauge(
    "elastipod_goodput_ratio", "Share of training in the time of the jobs that are there, without queues", registry=None
)
GENERATIONS = Counter("elastipod_generations_total", "Starts of workers", ["kind"])
_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
RECONCILE_SECONDS = Histogram(
    "elastipod_reconcile_seconds",
    "Time of one decision with its reads, the writes of the job and the calls to agents; pods are made and deleted beside it",
    buckets=_SECONDS,
)
DECISION_SECONDS = Histogram(
    "elastipod_decision_seconds", "Time of one decision alone: no read, no write, no call in it", buckets=_SECONDS
)
API_SECONDS = Histogram(
    "elastipod_api_write_seconds", "Time of one write to the API server", ["what"], buckets=_SECONDS
)
POD_ORDER_SECONDS = Histogram(
    "elastipod_pod_order_seconds",
    "Time from when a decision has a pod made or deleted to the answer of the API server, with the wait for its turn",
    buckets=_SECONDS,
)
API_CALLS = Counter("elastipod_api_writes_total", "Writes to the API server", ["what", "outcome"])
OPERATOR_ERRORS = Counter(
    "elastipod_operator_errors_total",
    "Mistakes of the operator itself, by what failed: a pass over a job, its pods, the handling of a failure, a task, or the "
    "reading of an object",
    ["what"],
)
AGENT_FAILURES = Counter("elastipod_agent_call_failures_total", "Calls to agents that failed")
QUOTA_WAIT_SECONDS = Histogram(
    "elastipod_quota_wait_seconds",
    "Time that Kueue took to admit a Workload, as this operator saw it",
    ["share"],
    buckets=(1, 3, 10, 30, 100, 300, 1000, 3000, 10000, 30000, 100000),
)
EVICTIONS = Counter("elastipod_quota_evictions_total", "Workloads whose quota Kueue took back", ["share", "cause"])
EVICTIONS_LATE = Gauge(
    "elastipod_quota_evictions_overdue",
    "Workloads that hold quota which Kueue wants back, longer than the grace time",
    registry=None,
)
EVICTION_CAUSES = (
    "Preempted", "PodsReadyTimeout", "AdmissionCheck", "ClusterQueueStopped", "LocalQueueStopped", "NodeFailures", "Deactivated",
)  # fmt: skip


def export_leading() -> None:
    """Begin to export what only the operator that leads can tell; more than once does no harm."""
    for gauge in (GOODPUT, EVICTIONS_LATE):
        with suppress(ValueError):  # it is exported already
            REGISTRY.register(gauge)


def eviction_cause(reason: str) -> str:
    """Give one of few causes for a reason of Kueue's."""
    return next((cause for cause in EVICTION_CAUSES if reason.startswith(cause)), "Other")
