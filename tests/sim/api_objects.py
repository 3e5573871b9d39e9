"""What the API server of the model holds, the watches of it, and what users do with the job."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.authentication import Network
from tests.sim.invariant_state import JOB_NAME, JOB_UID
from tests.sim.invariants import InvariantChecker
from tests.sim.kernel import EPOCH, Kernel, format_time
from tests.sim.objects import NAMESPACE, Body, SimJob, SimNode, SimPod
from tests.sim.training import Training
from tests.sim.watches import KEPT_EVENTS, Watch, Watcher

from elastipod_operator.core.names import (
    ANNOTATION_APPLIED,
    ANNOTATION_HISTORY,
    ANNOTATION_SIZE,
    ANNOTATION_STATE,
    FINALIZER,
)
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.observed_job import effective_job

if TYPE_CHECKING:
    from tests.sim.kueue_server import Tenant


# What these annotations say does not matter to the spec in force, only whether they are there.
WITHOUT_SPEC = {ANNOTATION_HISTORY, ANNOTATION_SIZE, ANNOTATION_STATE}


class ApiFailure(ApiError):
    """The API server answered with an error; status 0: it did not answer, whatever it did."""


class ApiObjects(ABC):
    """The job, its pods and the nodes, who is told of them, and what users do with the job."""

    def __init__(
        self,
        kernel: Kernel,
        rng: Random,
        checker: InvariantChecker,
        training: Training,
        spec: Body,
        number: int = 0,
    ) -> None:
        self.kernel = kernel
        self.rng = rng
        self.checker = checker
        self.training = training
        self.job: SimJob | None = SimJob(spec)
        self.pods: dict[str, SimPod] = {}
        self.nodes: dict[str, SimNode] = {}
        self.met = checker.met
        self.faults_until: dict[str, float] = {}
        """Until when each trouble of the API server and of the calls goes on."""
        self.tenant: Tenant | None = None
        """The job's way to Kueue; None for a job without a queue."""
        self.labels: Mapping[str, str] = {}
        """Of the job."""
        self.clock_offset_s = 0.0
        """Of the operator's machine."""
        self.api_clock_s = 0.0
        """How far the clock of the API server is ahead."""
        self.unseen_until = 0.0
        """Until when the operator may hear late how nodes are."""
        self._in_force: tuple[Body | None, Mapping[str, str], Body] = (None, {}, spec)
        """The spec and the annotations that it was read from, and the spec in force."""
        self.is_fenced = True
        """Whether no operator acts on what it saw before others went on."""
        self.writes = 0
        self.last_write = ""
        self.called_at: list[float] = []
        """When operators called it or agents."""
        self.events: deque[Body] = deque(maxlen=KEPT_EVENTS)
        """The newest Events about the job."""
        self._versions = 1
        self._uids = 0
        self.secrets: dict[str, dict[str, str]] = {}
        self.network = Network(self.met, lambda: self.kernel.now)
        self.namespace = NAMESPACE if not number else f"{NAMESPACE}-{number}"
        self.job_uid = checker.job_uid = JOB_UID if not number else f"{JOB_UID}-{number}"
        self.prefix = "" if not number else f"{self.namespace}-"
        """Of the UIDs of pods and the names of nodes."""
        self.number = number
        self._watches: list[Watch] = []

    @property
    def is_seen(self) -> bool:
        """Whether the operator hears in time how nodes are."""
        return self.kernel.now >= self.unseen_until

    @abstractmethod
    def delete(self, pod: SimPod, *, force: bool = False, disrupted: str = "", grace_s: float | None = None) -> None:
        """Delete a pod as kubectl, the eviction API or a controller does."""

    @abstractmethod
    def drop(self, pod: SimPod) -> None:
        """The object is gone; its kubelet, if it lives, ends the container."""

    @abstractmethod
    def wake_scheduler(self) -> None:
        """Something changed that may let a pod run."""

    @abstractmethod
    def new_pod(self, manifest: Mapping[str, Any], uid: str) -> SimPod:
        """Make a pod of this cluster."""

    def goes_on(self, trouble: str) -> bool:
        """Whether a trouble is under way."""
        return self.kernel.now < self.faults_until.get(trouble, 0.0)

    def utc(self, at: float) -> datetime:
        """Give a time as the API server writes it."""
        return EPOCH + timedelta(seconds=at + self.api_clock_s)

    # -- watches

    def watch(self, watcher: Watcher) -> Watch:
        """Begin to tell somebody about everything, as a client that lists and then watches."""
        watch = Watch(self.kernel, watcher)
        self._watches.append(watch)
        for node in self.nodes.values():
            watcher("node", "ADDED", node.body())
        self._tell_all(watch)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """End a watch."""
        watch.is_open = False
        self._watches.remove(watch)

    def relist(self) -> None:
        """The version from which a broken watch wants to go on is gone (410): what is there is told, what went is not."""
        self.met["API: 410"] += len(self._watches)
        for watch in self._watches:
            for node in self.nodes.values():
                watch.tell("node", "ADDED", node.body(), 0.05)
            self._tell_all(watch)
        if self.tenant is not None:
            self.tenant.end_streams()

    def repeat_events(self) -> int:
        """Every watch is told its last events once more."""
        told = sum(watch.repeat() for watch in self._watches)
        self.met["watch: repeated"] += told
        return told

    def _tell_all(self, watch: Watch) -> None:
        if self.job is not None:
            watch.tell("job", "ADDED", self.job_body(), self.lag_s())
        for pod in self.pods.values():
            watch.tell("pod", "ADDED", pod.body(), self.lag_s())

    def tell(self, kind: str, change: str, body: Body) -> None:
        """Tell all watches of a change, if they hear of it."""
        for watch in self._watches:
            if self.goes_on("broken_watch"):
                self.met[f"watch: lost {kind} {change}"] += 1
            else:
                watch.tell(kind, change, body, self.lag_s())

    def lag_s(self) -> float:
        if not self.goes_on("slow_watch"):
            return self.rng.uniform(0.005, 0.1)
        self.met["watch: late"] += 1
        return self.rng.uniform(1.0, 8.0)

    def bump(self) -> int:
        """Give the next resourceVersion."""
        self._versions += 1
        return self._versions

    def pod_changed(self, pod: SimPod, change: str = "MODIFIED") -> None:
        """Tell of a pod that is another one now."""
        pod.version = self.bump()
        self.tell("pod", change, pod.body())

    def keep_event(self, reason: str, message: str) -> None:
        """Keep an Event about the job."""
        self.events.append({"reason": reason, "message": message, "lastTimestamp": format_time(self.kernel.utc())})

    # -- the job, and what users do with it

    def job_body(self) -> Body:
        job = self._the_job()
        meta: Body = {
            "name": JOB_NAME, "namespace": self.namespace, "uid": self.job_uid, "resourceVersion": str(job.version),
            "creationTimestamp": format_time(self.utc(0.0)), "annotations": {**job.annotations, **job.wishes},
            "finalizers": list(job.finalizers), "labels": dict(self.labels),
        }  # fmt: skip
        if job.deleted_at is not None:
            meta["deletionTimestamp"] = format_time(self.utc(job.deleted_at))
        return {"metadata": meta, "spec": copy.copy(job.spec), "status": copy.copy(job.status)}

    def spec_in_force(self) -> Body:
        """Give the job's spec or, while an edit cannot be used, the last one that could be."""
        job = self._the_job()
        written, annotations, in_force = self._in_force
        read = {name: "" if name in WITHOUT_SPEC else value for name, value in (job.annotations | job.wishes).items()}
        if written is not job.spec or annotations != read:
            in_force = dict(effective_job(self.job_body())[0]["spec"])
            self._in_force = (job.spec, read, in_force)
        return in_force

    def copy_annotations(self, annotations: Mapping[str, str]) -> None:
        """The job is applied from a manifest that was exported with these."""
        self._the_job().annotations |= annotations

    def delete_job(self) -> None:
        """Delete the job; it goes when its last finalizer does."""
        job = self._the_job()
        if job.deleted_at is None:
            job.deleted_at = self.kernel.now
            self._job_changed()

    def edit_job(self, change: Callable[[Body], None]) -> None:
        """An edit by the user."""
        if self.job is not None:
            self.job.spec = copy.deepcopy(self.job.spec)
            change(self.job.spec)
            self._job_changed()

    def annotate_job(self, annotation: str, value: str) -> None:
        """An annotation by the user."""
        if self.job is not None:
            self.job.wishes[annotation] = value
            self._job_changed()

    def wipe_record(self, *, leaves_history: bool) -> None:
        """Somebody removes the operator's annotations."""
        if self.job is not None:
            self.checker.record_wiped(with_spec=not leaves_history)
            kept = (ANNOTATION_HISTORY, ANNOTATION_APPLIED) if leaves_history else ()
            self.job.annotations = {k: v for k, v in self.job.annotations.items() if k in kept}
            self._job_changed()

    def _the_job(self) -> SimJob:
        if self.job is None:
            raise ApiFailure(404, "the job is gone")
        return self.job

    def _collect(self, pod: SimPod) -> None:
        """Do what the garbage collector does with a pod whose job is gone."""
        if pod.uid in self.pods:
            self.delete(pod)

    def _job_changed(self) -> Body:
        job = self._the_job()
        job.version = self.bump()
        body = self.job_body()
        if job.deleted_at is not None and FINALIZER not in job.finalizers:
            self.job = None
            self.tell("job", "DELETED", body)
            for pod in list(self.pods.values()):
                self.kernel.after(self.rng.uniform(1.0, 5.0), partial(self._collect, pod))
            self.secrets.clear()
            if self.tenant is not None:
                self.tenant.server.watch.job_gone(self.tenant)
                self.kernel.after(self.rng.uniform(1.0, 5.0), self.tenant.collect)
        else:
            self.tell("job", "MODIFIED", body)
        return body
