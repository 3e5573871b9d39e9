"""Counters and gauges for Prometheus; labels are bounded."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

STATES = ("Created", "Suspended", "PodsRunning", "Running", "Faulted", "Completed", "Failed")
JOBS = Gauge("elastipod_jobs", "Jobs known to this operator", ["state"])
GENERATIONS = Counter("elastipod_generations_total", "Starts of workers", ["kind"])
RECONCILE_SECONDS = Histogram(
    "elastipod_reconcile_seconds",
    "Time of one decision and its writes",
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10),
)
API_CALLS = Counter("elastipod_api_writes_total", "Writes to the API server", ["what", "outcome"])
AGENT_FAILURES = Counter("elastipod_agent_call_failures_total", "Calls to agents that failed")
