"""The model of the API server: versions, watches that lag, lose and repeat, calls that fail before or after their effect."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Mapping
from datetime import datetime, timedelta
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from tests.sim.invariants import JOB_NAME, JOB_UID, InvariantChecker, Violation
from tests.sim.kernel import EPOCH, Kernel, format_time
from tests.sim.objects import NAMESPACE, Body, SimJob, SimNode, SimPod
from tests.sim.training import Training

from elastipod_operator.core.names import ANNOTATION_APPLIED, ANNOTATION_HISTORY, FINALIZER, LABEL_UID, pod_id_of
from elastipod_operator.kube.api import ApiError
from elastipod_operator.kube.observed_job import effective_job

if TYPE_CHECKING:
    from tests.sim.kueue_server import Tenant

CALL_LIMIT_S = 10.0
KEPT_EVENTS = 25
# From a cordon to a decision that knows of it.
CORDON_SEEN_S = 3.0

Watcher = Callable[[str, str, Body], None]


class ApiFailure(ApiError):
    """The API server answered with an error; status 0: it did not answer, whatever it did."""


class Watch:
    """What one client was told and is to be told, in order for each kind of object."""

    def __init__(self, kernel: Kernel, watcher: Watcher) -> None:
        self._kernel = kernel
        self._watcher = watcher
        self._delivered_at: dict[str, float] = {}
        self._kept: deque[tuple[str, str, Body]] = deque(maxlen=KEPT_EVENTS)
        self.is_open = True

    def tell(self, kind: str, change: str, body: Body, lag_s: float) -> None:
        """Deliver an event after a while, behind those that are on their way."""
        self._kept.append((kind, change, body))
        at = max(self._delivered_at.get(kind, 0.0), self._kernel.now + lag_s)
        self._delivered_at[kind] = at
        self._kernel.at(at, lambda: self._deliver(kind, change, body))

    def repeat(self) -> int:
        """A stream that begins anew a little earlier tells the last events once more; gives how many."""
        for event in (kept := list(self._kept)):
            self.tell(*event, lag_s=0.01)
        return len(kept)

    def _deliver(self, kind: str, change: str, body: Body) -> None:
        if self.is_open:
            self._watcher(kind, change, body)


class ApiServer(ABC):
    """The objects, and everybody's way to them. What becomes of pods is up to the rest of the cluster."""

    def __init__(self, kernel: Kernel, rng: Random, checker: InvariantChecker, training: Training, spec: Body) -> None:
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
        self.is_seen = True
        """Whether the operator hears in time how nodes are."""
        self._in_force: tuple[int, Body] = (-1, spec)
        """The version of the job that it was read from, and the spec."""
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
        self._watches: list[Watch] = []

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

    # -- calls of the operator; each is a script that takes time and may fail before or after its effect

    def call(self, effect: Callable[[], Any], *, writes: bool = True) -> Generator[float, None, Any]:
        """Carry out a call."""
        yield self.rng.uniform(0.002, 0.02)
        if self.goes_on("api_down"):
            raise self._failed("API: not there", 0, "connection refused")
        if self.goes_on("api_throttles") and self.rng.random() < 0.5:
            raise self._failed("API: 429", 429, "too many requests")
        if self.goes_on("api_fails") and self.rng.random() < 0.3:
            raise self._failed("API: 5xx", self.rng.choice((500, 503)), "the server cannot handle the request")
        if self.goes_on("busy_job") and writes and self.rng.random() < 0.5:
            self.edit_job(lambda spec: None)  # somebody else was quicker
        self.writes += writes
        answer = effect()
        lost = "API: answer lost" if self.goes_on("api_loses_answers") else "API: 5xx after the effect"
        if (self.goes_on("api_loses_answers") or self.goes_on("api_fails")) and self.rng.random() < 0.3:
            yield CALL_LIMIT_S / 10
            raise self._failed(f"{lost} of a {'write' if writes else 'read'}", 504, "the answer was lost")
        yield self.rng.uniform(0.002, 0.02)
        return answer

    def _failed(self, what: str, status: int, message: str) -> ApiFailure:
        self.met[what] += 1
        return ApiFailure(status, message)

    def job_body(self) -> Body:
        job = self._the_job()
        meta: Body = {
            "name": JOB_NAME, "namespace": NAMESPACE, "uid": JOB_UID, "resourceVersion": str(job.version),
            "creationTimestamp": format_time(self.utc(0.0)), "annotations": {**job.annotations, **job.wishes},
            "finalizers": list(job.finalizers), "labels": dict(self.labels),
        }  # fmt: skip
        if job.deleted_at is not None:
            meta["deletionTimestamp"] = format_time(self.utc(job.deleted_at))
        return {"metadata": meta, "spec": copy.copy(job.spec), "status": copy.copy(job.status)}

    def spec_in_force(self) -> Body:
        """Give the job's spec or, while an edit cannot be used, the last one that could be."""
        job = self._the_job()
        if self._in_force[0] != job.version:
            self._in_force = (job.version, dict(effective_job(self.job_body())[0]["spec"]))
        return self._in_force[1]

    def copy_annotations(self, annotations: Mapping[str, str]) -> None:
        """The job is applied from a manifest that was exported with these."""
        self._the_job().annotations |= annotations

    def patch_metadata(self, version: str, metadata: Mapping[str, Any]) -> Body:
        job = self._the_job()
        if str(job.version) != version:
            raise self._failed("API: 409 of the record", 409, "the object has been modified")
        if not metadata:
            return self.job_body()  # nothing changes, not even the version
        self.last_write = f"metadata {dict(metadata)}"
        annotations = {**job.annotations, **metadata.get("annotations", {})}
        # What was placed just now need not be known to the operator, and is as good as new.
        bound = {
            pod.uid for pod in self.pods.values() if pod.node is not None and self.kernel.now - pod.placed_at > 15.0
        }
        cordoned = {
            pod_id_of(pod.labels)
            for pod in self.pods.values()
            if self.is_seen and pod.node is not None and pod.node.cordoned
            and self.kernel.now - pod.node.cordoned_at > CORDON_SEEN_S
        }  # fmt: skip
        now = self.kernel.utc()
        self.checker.record_written(
            job.annotations, annotations, self.spec_in_force(), self.training, now, bound, cordoned
        )
        job.annotations = annotations
        if "finalizers" in metadata:
            job.finalizers = list(metadata["finalizers"])
        return self._job_changed()

    def apply_status(self, status: Body) -> Body:
        job = self._the_job()
        self.checker.status_written(status)
        self.last_write = f"status {[c for c in status['conditions'] if c not in job.status.get('conditions', [])]}"
        if job.status == status:
            return self.job_body()
        job.status = status
        return self._job_changed()

    def create_pod(self, manifest: Mapping[str, Any]) -> Body:
        name = manifest["metadata"]["name"]
        if self.goes_on("creates_refused"):
            raise self._failed("API: 403 of a pod", 403, "exceeded quota: team")
        if any(pod.name == name for pod in self.pods.values()):
            raise self._failed("API: 409 of a pod", 409, f"pods {name} already exists")
        self._uids += 1
        pod = self.new_pod(manifest, f"pod-{self._uids}")
        if self.job is not None:
            images = {pod_id_of(p.labels): p.image for p in self.pods.values()}
            self.checker.pod_made(name, pod.avoids, pod.image, images, self.spec_in_force())
        self.pods[pod.uid] = pod
        if self.tenant is not None:
            self.tenant.server.watch.pod_made(self.tenant, pod)
        self.pod_changed(pod, "ADDED")
        self.wake_scheduler()
        if self.job is None:
            if self.is_fenced:
                raise Violation(f"pod {name} is made though its job is gone")
            self.kernel.after(2.0, lambda: self.drop(pod))
        return pod.body()

    def admission(self) -> Generator[float, None, None]:
        """What a pod waits for before it is there: webhooks, which may be slow."""
        if self.goes_on("slow_admission"):
            self.met["API: slow admission"] += 1
            yield self.rng.uniform(0.5, 0.8 * CALL_LIMIT_S)

    def listed(self, path: str, query: Mapping[str, str]) -> Body:
        """List nodes, or the pods of a node that have not ended."""
        if path.endswith("nodes"):
            return {"items": [node.body() for node in self.nodes.values()]}
        name = query["fieldSelector"].partition(",")[0].removeprefix("spec.nodeName=")
        there = (p for p in self.pods.values() if p.node is not None and p.node.name == name and not p.ended)
        return {"items": [pod.body() for pod in there]}

    def list_pods(self) -> tuple[list[Body], int]:
        return [pod.body() for pod in self.pods.values() if pod.labels[LABEL_UID] == JOB_UID], self._versions

    @abstractmethod
    def is_gone(self, pod: SimPod) -> bool:
        """Whether nothing of a pod can run any more, or nobody can know (docs/design/operator.md)."""

    def delete_pod(self, name: str, uid: str, *, force: bool, grace_s: int | None = None) -> Body:
        pod = self.pods.get(uid)
        if pod is None or pod.name != name:
            raise ApiFailure(404, f"pods {name} not found")
        pod.is_unwanted = True
        if self.goes_on("deletes_refused"):
            raise self._failed("API: 403 of a deletion", 403, "pods is forbidden")
        if force and self.is_seen and not self.is_gone(pod):
            raise Violation(f"pod {name} is removed by force though its kubelet would end it")
        self.met["a kubelet is hurried"] += grace_s is not None
        self.delete(pod, force=force, grace_s=grace_s)
        return pod.body() if uid in self.pods else {"kind": "Status"}

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
            if self.tenant is not None:
                self.tenant.server.watch.job_gone(self.tenant)
                self.kernel.after(self.rng.uniform(1.0, 5.0), self.tenant.collect)
        else:
            self.tell("job", "MODIFIED", body)
        return body
