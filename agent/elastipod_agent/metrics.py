"""The agent's metrics: counters of its parts, values that are read at a scrape, and Prometheus' text format 0.0.4.

The format is written here because the agent adds no package to the user's image. Only numbers and short names are exposed, so the port
needs no authentication (docs/design/contracts.md).
"""

from __future__ import annotations

import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from elastipod_agent import __version__
from elastipod_agent.core.states import AgentState
from elastipod_agent.server.http import Request
from elastipod_agent.server.http_messages import Response
from elastipod_agent.status import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX = "elastipod_agent_"
Labels = tuple[tuple[str, str], ...]

# All metrics: name -> kind and help. Labels are bounded: states, HTTP status codes, and the reasons of /status.
FAMILIES = {
    "build_info": ("gauge", "1, with the agent's version"),
    "state": ("gauge", "1 for the state of the agent, 0 for the other states"),
    "terminating": ("gauge", "1 once the pod is being terminated (SIGTERM)"),
    "generation": ("gauge", "Generation that was last started in this pod"),
    "group_rank": ("gauge", "Group rank: the pod's rank among the pods of the job"),
    "status_changes_total": ("counter", "Changes of the status"),
    "starts_total": ("counter", "Generations started in this pod"),
    "restarts_total": ("counter", "Generations started in this pod after the first"),
    "worker_starts_total": ("counter", "Worker processes started: warm (forked) or cold (a new interpreter)"),
    "last_start_seconds": ("gauge", "Time from the last /start until all workers ran"),
    "faults_total": ("counter", "Generations that ended in a fault, by reason"),
    "drains_total": ("counter", "Generations whose workers drained"),
    "completed_total": ("counter", "Generations whose workers completed the training"),
    "worker_step": ("gauge", "Completed optimizer steps of the job, as last reported by local rank 0"),
    "worker_samples": ("gauge", "Samples that the job has used"),
    "worker_samples_per_second": ("gauge", "Samples per second of the job"),
    "worker_loss": ("gauge", "Loss, as last reported"),
    "worker_world_size": ("gauge", "Workers in the job"),
    "worker_report_seconds": ("gauge", "Unix time of the last report"),
    "output_bytes_total": ("counter", "Bytes that workers and scripts have printed"),
    "calls_total": ("counter", "Calls of the control API, by HTTP status"),
    "refused_calls_total": ("counter", "Calls that were refused before they were handled, by HTTP status"),
    "resident_memory_bytes": ("gauge", "Resident memory of the agent's own process"),
    "cpu_seconds_total": ("counter", "CPU time of the agent's own process"),
    "open_fds": ("gauge", "Open file descriptors of the agent's own process"),
    "start_time_seconds": ("gauge", "Unix time at which the agent started"),
}


class Metrics:
    """Values by family and labels. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        """Add to a counter, which starts at 0."""
        key = _labels(name, labels)
        with self._lock:
            family = self._values.setdefault(name, {})
            family[key] = family.get(key, 0) + amount

    def set(self, name: str, value: float | None, **labels: str) -> None:
        """Set a gauge, or a counter that is counted elsewhere; None removes it, because there is no value."""
        key = _labels(name, labels)
        with self._lock:
            if value is None:
                self._values.get(name, {}).pop(key, None)
            else:
                self._values.setdefault(name, {})[key] = value

    def value(self, name: str, **labels: str) -> float:
        """Give one value, 0 if it was never counted or set."""
        key = _labels(name, labels)
        with self._lock:
            return self._values.get(name, {}).get(key, 0)

    def render(self) -> str:
        """Give all values in the text format."""
        with self._lock:
            seen = {name: dict(values) for name, values in self._values.items() if values}
        return "".join(line for name in FAMILIES if name in seen for line in _lines(name, seen[name]))


METRICS = Metrics()
"""The metrics of this process."""


def _labels(name: str, labels: Mapping[str, str]) -> Labels:
    assert name in FAMILIES, f"{name} is not a metric of the agent; add it to FAMILIES"
    return tuple(sorted(labels.items()))


def _lines(name: str, values: Mapping[Labels, float]) -> Iterator[str]:
    kind, meaning = FAMILIES[name]
    yield f"# HELP {_PREFIX}{name} {meaning}\n# TYPE {_PREFIX}{name} {kind}\n"
    for labels, value in sorted(values.items()):
        pairs = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels)
        yield f"{_PREFIX}{name}{'{' + pairs + '}' if pairs else ''} {_number(value)}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


def count_changes(before: Status, after: Status, metrics: Metrics) -> None:
    """Count what a change of the status means."""
    entered = AgentState.RUNNING.name
    is_new = after.transitions.get(entered) != before.transitions.get(entered)
    if is_new:
        metrics.count("starts_total")
        if metrics.value("starts_total") > 1:
            metrics.count("restarts_total")
    if after.failure is not None and (is_new or after.failure != before.failure):
        metrics.count("faults_total", reason=after.reason or "Unknown")
    if after.drained and (is_new or not before.drained):
        metrics.count("drains_total")
    if after.state is AgentState.COMPLETED and (is_new or before.state is not AgentState.COMPLETED):
        metrics.count("completed_total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Sources of the values that are read at a scrape. worker: the last report, as in /status."""

    status: Callable[[], Status]
    worker: Callable[[], Mapping[str, Any]]
    output_bytes: Callable[[], int]


class MetricsPage:
    """Answers /metrics; `handle` is what the server calls."""

    def __init__(self, metrics: Metrics, sources: Sources) -> None:
        self._metrics = metrics
        self._sources = sources
        metrics.set("build_info", 1, version=__version__, python=".".join(map(str, sys.version_info[:3])))
        metrics.set("start_time_seconds", time.time())
        for name, (kind, _) in FAMILIES.items():  # a rate needs a first value; counters with labels have none yet
            if kind == "counter" and name not in _LABELLED:
                metrics.count(name, 0)

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        if request.path != "/metrics":
            return Response(HTTPStatus.NOT_FOUND, b"only /metrics is here\n", {"Content-Type": "text/plain"})
        if request.method != "GET":
            return Response(HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": "GET"})
        self._read()
        return Response(HTTPStatus.OK, self._metrics.render().encode(errors="replace"), {"Content-Type": CONTENT_TYPE})

    def _read(self) -> None:
        status, worker, gauge = self._sources.status(), self._sources.worker(), self._metrics.set
        for state in AgentState:
            gauge("state", float(state is status.state), state=state.value)
        gauge("terminating", float(status.terminating))
        gauge("generation", status.generation)
        gauge("group_rank", status.assigned_rank)
        gauge("status_changes_total", status.version)
        for name, field in _WORKER_FIELDS.items():
            gauge(name, worker.get(field))
        gauge("output_bytes_total", self._sources.output_bytes())
        gauge("resident_memory_bytes", _resident_bytes())
        gauge("cpu_seconds_total", sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        gauge("open_fds", _open_fds())


_WORKER_FIELDS = {
    "worker_step": "step",
    "worker_samples": "samples",
    "worker_samples_per_second": "samples_per_s",
    "worker_loss": "loss",
    "worker_world_size": "world_size",
    "worker_report_seconds": "time",
}
_LABELLED = frozenset({"worker_starts_total", "faults_total", "calls_total", "refused_calls_total"})


def _resident_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _open_fds() -> int | None:
    with suppress(OSError):
        return len(os.listdir("/proc/self/fd"))
    return None
