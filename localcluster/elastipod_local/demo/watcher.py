"""Watches the job while the demo runs: its size, state, Events and progress, and waits for them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Protocol

from elastipod_local.demo.report import HistoryEntry, parse_history
from elastipod_local.demo.run_log import find_logs, parse_log
from elastipod_local.errors import LocalClusterError

POLL_EVERY_S = 2.0
RATE_OVER_S = 5.0
ENDED = frozenset({"Completed", "Failed"})
# What the API server has at hand is new enough, and costs it no reading from etcd beside the training.
JOBS = "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs?resourceVersion=0"
EVENTS = "/api/v1/namespaces/default/events?resourceVersion=0"


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of the training, from the newest lines of a rank's sample log; rates cover the last seconds.

    unsaved_steps: steps since the newest durable checkpoint, which are only in memory.
    """

    generation: int
    step: int
    loss: float | None
    samples_per_s: float | None
    unsaved_steps: int = 0


@dataclass(frozen=True, slots=True)
class JobEvent:
    """A Kubernetes Event. kind: that of the object that it concerns."""

    kind: str
    reason: str
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """The observed job at one moment. size: running/target/max as the operator prints it."""

    job: str = "the job"
    at: float = 0.0
    state: str = "not created"
    reason: str = ""
    message: str = ""
    size: str = "-"
    history: tuple[HistoryEntry, ...] = ()
    progress: Progress | None = None
    last_events: tuple[str, ...] = ()
    problem: str = ""

    @property
    def generation(self) -> int:
        """The newest generation that has made a step, 0 before the first."""
        return self.progress.generation if self.progress else 0

    @property
    def training_size(self) -> int:
        """Replicas of the newest generation that has made a step, 0 before the first."""
        return next((entry.size for entry in reversed(self.history) if entry.generation == self.generation), 0)

    def __str__(self) -> str:
        step = f"step {self.progress.step} of generation {self.generation}" if self.progress else "no step yet"
        said = f" ({self.reason}: {self.message})" if self.reason else ""
        last = f"; last event: {self.last_events[-1]}" if self.last_events else ""
        return f"{self.job}: state {self.state}{said}, size {self.size}, {step}{last}{f'; {self.problem}' if self.problem else ''}"


class Api(Protocol):
    """The only interface to the cluster that is needed here: an object, or None while the server does not answer.

    A kubectl for each look would take processor time from the training, most of all in the pauses that the demo shows.
    """

    def get(self, path: str) -> Mapping[str, Any] | None: ...


def read_job(job: Mapping[str, Any]) -> dict[str, Any]:
    """Give state, reason, message, size and history of a job as the API server returned it."""
    annotations = job["metadata"].get("annotations", {})
    conditions = job.get("status", {}).get("conditions") or []
    last = conditions[-1] if conditions else {}
    return {
        "state": last.get("type", "not seen by the operator yet"),
        "reason": last.get("reason", ""),
        "message": last.get("message", ""),
        "size": annotations.get("elastipod.io/size", "-"),
        "history": parse_history(json.loads(annotations.get("elastipod.io/history", "[]"))),
    }


def read_progress(shared: Path, job: str) -> Progress | None:
    """Give the progress that rank 0 of a job's newest generation with a step has logged; None before the first step."""
    folder = find_logs(shared, job)
    if folder is None:
        return None
    progress: Progress | None = None
    for path in sorted(folder.glob("gen-*-rank-00000.jsonl"), reverse=True):
        start, *lines = parse_log(path.read_bytes()) or [{}]
        # Scripts with `elastipod.State` log a step when it begins, and again when it is done; others only then.
        steps = _of_kind("done", lines) or _of_kind("step", lines)
        if steps and progress is None:
            rate = _rate(steps) * start["global_batch"]
            progress = Progress(start["generation"], steps[-1]["step"], steps[-1].get("loss"), rate or None)
        # A generation may go on from memory, so the newest checkpoint may be of an earlier one.
        if progress is not None and (saved := _of_kind("saved", lines)):
            return replace(progress, unsaved_steps=max(0, progress.step - saved[-1]["step"]))
    return progress if progress is None else replace(progress, unsaved_steps=progress.step)


def _of_kind(kind: str, lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["kind"] == kind]


def _rate(steps: Sequence[Mapping[str, Any]]) -> float:
    """Give steps per second over the last few seconds of a log."""
    recent = [step for step in steps if step["t"] >= steps[-1]["t"] - RATE_OVER_S]
    passed = recent[-1]["t"] - recent[0]["t"]
    return (len(recent) - 1) / passed if passed > 0 else 0.0


def read_event(event: Mapping[str, Any]) -> JobEvent:
    """Read a Kubernetes Event; its message becomes one line."""
    return JobEvent(event["involvedObject"]["kind"], event["reason"], " ".join(event["message"].split()))


def is_about(event: Mapping[str, Any], job: str) -> bool:
    """Whether an Event is about this job or one of its Workloads, which are named after it."""
    about = event["involvedObject"]
    if about.get("kind") == "Workload":
        return re.fullmatch(rf"{re.escape(job)}-(base|more-\d+)-[0-9a-f]{{5}}", about.get("name", "")) is not None
    return bool(about.get("kind") == "HyperPodPyTorchJob" and about.get("name") == job)


def _written(event: Mapping[str, Any]) -> tuple[str, int]:
    """When an event was written; within a second by its version, which grows with every write."""
    metadata = event["metadata"]
    version = str(metadata.get("resourceVersion", ""))
    return str(metadata["creationTimestamp"]), int(version) if version.isdigit() else 0


@dataclass(slots=True)
class _EventLog:
    """Events in the order in which they were first seen; a repeated one counts again."""

    known: dict[str, int] = field(default_factory=dict)
    all: list[JobEvent] = field(default_factory=list)

    def add(self, events: Sequence[Mapping[str, Any]]) -> list[JobEvent]:
        fresh = []
        for event in sorted(events, key=_written):
            uid, count = event["metadata"]["uid"], event.get("count") or 1
            if self.known.get(uid) != count:
                self.known[uid] = count
                fresh.append(read_event(event))
        self.all += fresh
        return fresh


class Watcher:
    """Observes one job every two seconds in its own thread, as a context manager.

    on_event gets the Events of the job itself; those of its Workloads are only kept, in `events`.
    """

    def __init__(
        self,
        api: Api,
        *,
        name: str,
        shared: Path,
        on_snapshot: Callable[[JobSnapshot], None],
        on_event: Callable[[str], None],
    ) -> None:
        self._api = api
        self._name = name
        self._shared = shared
        self._on_snapshot = on_snapshot
        self._on_event = on_event
        self._events = _EventLog()
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._snapshot = JobSnapshot()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="demo-watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join(timeout=30)

    @property
    def snapshot(self) -> JobSnapshot:
        """The last observation."""
        return self._snapshot

    @property
    def events(self) -> tuple[JobEvent, ...]:
        """All Events of the job and its Workloads so far, in order."""
        return tuple(self._events.all)

    def wait_for(self, holds: Callable[[JobSnapshot], bool], what: str, *, deadline_s: float) -> JobSnapshot:
        """Wait until `holds` is true for an observation, and give it.

        Raises LocalClusterError with the last observation after deadline_s, and at once if the job has ended before.
        """
        end = monotonic() + deadline_s
        with self._changed:
            while not holds(seen := self._seen()):
                if seen.state in ENDED:
                    raise LocalClusterError(f"{self._name} ended before {what}: {seen}")
                self._wait_until(end, deadline_s, what)
            return seen

    def wait_for_end(self, *, stall_s: float) -> JobSnapshot:
        """Wait until the job has ended, however long it trains, and give the last observation.

        Raises LocalClusterError with the last observation stall_s after the last step.
        """
        end, counted = monotonic() + stall_s, self._snapshot.progress
        with self._changed:
            while (seen := self._seen()).state not in ENDED:
                if seen.progress != counted:
                    end, counted = monotonic() + stall_s, seen.progress
                self._wait_until(end, stall_s, "its end or a further step")
            return seen

    def _seen(self) -> JobSnapshot:
        """Give the last observation. Raises what has ended the watch."""
        if self._failure:
            raise self._failure
        return self._snapshot

    def _wait_until(self, end: float, patience_s: float, what: str) -> None:
        """Wait for the next observation."""
        remaining = end - monotonic()
        if remaining <= 0:
            raise LocalClusterError(f"waited {patience_s:g} s for {what}; last seen: {self._snapshot}")
        self._changed.wait(remaining)

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._poll()
                self._stopped.wait(POLL_EVERY_S)
        except BaseException as failure:  # raised in the thread that waits
            with self._changed:
                self._failure = failure
                self._changed.notify_all()

    def _poll(self) -> None:
        jobs, events = self._api.get(JOBS), self._api.get(EVENTS)
        problem = "the API server does not answer" if jobs is None or events is None else ""
        job = next((item for item in _items(jobs) if item["metadata"]["name"] == self._name), None)
        fresh = self._events.add([item for item in _items(events) if is_about(item, self._name)])
        facts = read_job(job) if job else {}
        snapshot = JobSnapshot(
            job=self._name,
            at=time.time(),
            progress=read_progress(self._shared, self._name),
            last_events=tuple(str(event) for event in self._events.all[-8:]),
            problem=problem,
            **facts,
        )
        for event in fresh:
            if event.kind != "Workload":
                self._on_event(str(event))
        self._on_snapshot(snapshot)
        with self._changed:
            self._snapshot = snapshot
            self._changed.notify_all()


def _items(found: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    return found["items"] if found is not None else ()
