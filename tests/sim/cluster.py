"""The model of a cluster: API server with watches and conflicts, scheduler, kubelets, nodes that fail in many ways."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random
from typing import Any

from tests.sim.agents import SimAgent
from tests.sim.events import Make
from tests.sim.invariants import JOB_NAME, Watchman
from tests.sim.kernel import EPOCH, Kernel, Script, stamp
from tests.sim.training import Training

from elastipod_operator.core.names import ANNOTATION_APPLIED, ANNOTATION_HISTORY, FINALIZER, LABEL_UID, pod_id_of

JOB_UID = "job-uid"
NAMESPACE = "team"
NOT_READY_AFTER_S = 45.0
EVICTION_AFTER_S = 300.0
CALL_LIMIT_S = 10.0
KEPT_EVENTS = 25

Body = dict[str, Any]
Watcher = Callable[[str, str, Body], None]


class ApiFailure(Exception):
    """The API server answered with an error; status 0: it did not answer, whatever it did."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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


@dataclass(slots=True)
class SimNode:
    """A machine. until: virtual times; what lasts until then ends by itself.

    frozen: all stands still. cut: nobody can reach it. hidden, deaf, mute: only the operator cannot; deaf: its calls do not
    arrive, mute: their answers and all states do not.
    """

    name: str
    powered: bool = True
    ready: bool = True
    cordoned: bool = False
    tainted: bool = False
    out_of_service: bool = False
    frozen_until: float = 0.0
    cut_until: float = 0.0
    hidden_until: float = 0.0
    deaf_until: float = 0.0
    mute_until: float = 0.0
    sick_until: float = 0.0
    silent_since: float | None = None
    version: int = 0

    def body(self) -> Body:
        taints = [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}] if self.tainted else []
        if self.out_of_service:
            taints.append({"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"})
        return {
            "metadata": {"name": self.name, "resourceVersion": str(self.version), "labels": {}},
            "spec": {"unschedulable": self.cordoned, "taints": taints},
            "status": {"conditions": [{"type": "Ready", "status": "True" if self.ready else "Unknown"}]},
        }


def avoided_by(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Give the nodes that a pod must not be placed on, as the scheduler reads it."""
    affinity = (manifest["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    demands = [demand for term in terms for demand in term.get("matchFields") or ()]
    return frozenset(d["values"][0] for d in demands if (d["key"], d["operator"]) == ("metadata.name", "NotIn"))


class SimPod:
    """A pod object and, while its container runs, its agent."""

    def __init__(self, cluster: Cluster, manifest: Mapping[str, Any], uid: str) -> None:
        self._cluster = cluster
        meta = manifest["metadata"]
        self.name: str = meta["name"]
        self.uid = uid
        self.labels: dict[str, str] = dict(meta["labels"])
        self.owners: list[Body] = list(meta["ownerReferences"])
        self.grace_s = float(manifest["spec"]["terminationGracePeriodSeconds"])
        self.created_at = cluster.kernel.now
        self.version = 0
        self.node: SimNode | None = None
        self.placed_at = 0.0
        self.phase = "Pending"
        self.ip = ""
        self.exit_code: int | None = None
        self.deleted_at: float | None = None
        self.disrupted = ""
        self.annotations: dict[str, str] = dict(meta.get("annotations") or {})
        self.image: str = manifest["spec"]["containers"][0].get("image", "")
        self.avoids = avoided_by(manifest)
        self.is_unwanted = False
        """The operator itself deleted it."""
        self.agent: SimAgent | None = None

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    def body(self) -> Body:
        meta: Body = {
            "name": self.name, "namespace": NAMESPACE, "uid": self.uid, "labels": self.labels,
            "annotations": self.annotations, "resourceVersion": str(self.version),
            "creationTimestamp": stamp(self._cluster.utc(self.created_at)),
            "ownerReferences": self.owners,
        }  # fmt: skip
        if self.deleted_at is not None:
            meta["deletionTimestamp"] = stamp(self._cluster.utc(self.deleted_at + self.grace_s))
        status: Body = {"phase": self.phase, "podIP": self.ip, "conditions": []}
        if self.disrupted:
            status["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": self.disrupted}]
        if self.phase == "Running":
            status["containerStatuses"] = [{"name": "train", "state": {"running": {"startedAt": stamp(EPOCH)}}}]
        elif self.ended:
            state = {"terminated": {"exitCode": self.exit_code or 0}}
            status["containerStatuses"] = [{"name": "train", "state": state}]
        return {
            "kind": "Pod",
            "metadata": meta,
            "spec": {"nodeName": self.node.name if self.node else ""},
            "status": status,
        }

    def node_runs(self) -> bool:
        """Whether its node is on, awake and connected to the other nodes."""
        node, now = self.node, self._cluster.kernel.now
        return node is not None and node.powered and node.frozen_until <= now and node.cut_until <= now

    def hears(self) -> bool:
        """Whether the operator's calls arrive at its agent."""
        node, now = self.node, self._cluster.kernel.now
        return self._is_open() and node is not None and max(node.hidden_until, node.deaf_until) <= now

    def answers(self) -> bool:
        """Whether answers of its agent arrive at the operator."""
        node, now = self.node, self._cluster.kernel.now
        return self._is_open() and node is not None and max(node.hidden_until, node.mute_until) <= now

    def _is_open(self) -> bool:
        return self.agent is not None and self.agent.alive and self.node_runs() and not self.agent.hangs()

    def agent_changed(self) -> None:
        for follower in list(self._cluster.followers):
            follower(self)

    def container_exits(self, code: int = 0) -> None:
        """The container's process is gone; its kubelet reports that."""
        if self.agent is not None and self.agent.alive:
            self.agent.die()
        elif self.agent is not None and self.exit_code is not None:
            return
        self.exit_code = code
        self._cluster.kernel.spawn(self._cluster.report_end(self))


@dataclass(slots=True)
class SimJob:
    """The job object."""

    spec: Body
    annotations: dict[str, str] = field(default_factory=dict)
    finalizers: list[str] = field(default_factory=list)
    status: Body = field(default_factory=dict)
    version: int = 1
    deleted_at: float | None = None
    wishes: dict[str, str] = field(default_factory=dict)
    """Annotations of the user."""


class Cluster:
    """Everything outside of the operator."""

    def __init__(self, kernel: Kernel, rng: Random, watchman: Watchman, training: Training, spec: Body) -> None:
        self.kernel = kernel
        self.rng = rng
        self.watchman = watchman
        self.training = training
        self.job: SimJob | None = SimJob(spec)
        self.pods: dict[str, SimPod] = {}
        self.nodes: dict[str, SimNode] = {}
        self.make = Make.OURS
        self.met = watchman.met
        self.spells: dict[str, float] = {}
        """Until when each trouble of the API server and of the calls goes on."""
        self.clock_offset_s = 0.0
        self.writes = 0
        self.last_write = ""
        self.may_be_late = not training.heeds_events
        """Whether a pod may be killed at the end of its grace: scripts that ignore events, an operator that is away."""
        self.followers: list[Callable[[SimPod], None]] = []
        """Who hears of changes of agents: the operators that live."""
        self._agents: list[SimAgent] = []
        self._versions = 1
        self._uids = 0
        self._watches: list[Watch] = []
        kernel.spawn(self._node_controller())

    def goes_on(self, trouble: str) -> bool:
        """Whether a trouble is under way."""
        return self.kernel.now < self.spells.get(trouble, 0.0)

    def utc(self, at: float) -> datetime:
        return EPOCH + timedelta(seconds=at)

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

    def repeat_events(self) -> int:
        """Every watch is told its last events once more."""
        told = sum(watch.repeat() for watch in self._watches)
        self.met["watch: repeated"] += told
        return told

    def _tell_all(self, watch: Watch) -> None:
        if self.job is not None:
            watch.tell("job", "ADDED", self.job_body(), self._lag_s())
        for pod in self.pods.values():
            watch.tell("pod", "ADDED", pod.body(), self._lag_s())

    def _send(self, kind: str, change: str, body: Body) -> None:
        for watch in self._watches:
            if self.goes_on("broken_watch"):
                self.met[f"watch: lost {kind} {change}"] += 1
            else:
                watch.tell(kind, change, body, self._lag_s())

    def _lag_s(self) -> float:
        if not self.goes_on("slow_watch"):
            return self.rng.uniform(0.005, 0.1)
        self.met["watch: late"] += 1
        return self.rng.uniform(1.0, 8.0)

    def _bump(self) -> int:
        self._versions += 1
        return self._versions

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
            "creationTimestamp": stamp(self.utc(0.0)), "annotations": {**job.annotations, **job.wishes},
            "finalizers": list(job.finalizers),
        }  # fmt: skip
        if job.deleted_at is not None:
            meta["deletionTimestamp"] = stamp(self.utc(job.deleted_at))
        return {"metadata": meta, "spec": copy.copy(job.spec), "status": copy.copy(job.status)}

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
        self.watchman.record_written(job.annotations, annotations, job.spec, self.training, self.kernel.utc(), bound)
        job.annotations = annotations
        if "finalizers" in metadata:
            job.finalizers = list(metadata["finalizers"])
        return self._job_changed()

    def apply_status(self, status: Body) -> Body:
        job = self._the_job()
        self.watchman.status_written(status)
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
        pod = SimPod(self, manifest, f"pod-{self._uids}")
        if self.job is not None:
            images = {pod_id_of(p.labels): p.image for p in self.pods.values()}
            self.watchman.pod_made(name, pod.avoids, pod.image, images, self.job.spec)
        self.pods[pod.uid] = pod
        self._pod_changed(pod, "ADDED")
        self.wake_scheduler()
        if self.job is None:
            self.kernel.after(2.0, lambda: self._drop(pod))
        return pod.body()

    def list_pods(self) -> tuple[list[Body], int]:
        return [pod.body() for pod in self.pods.values() if pod.labels[LABEL_UID] == JOB_UID], self._versions

    def delete_pod(self, name: str, uid: str, *, force: bool) -> Body:
        pod = self.pods.get(uid)
        if pod is None or pod.name != name:
            raise ApiFailure(404, f"pods {name} not found")
        pod.is_unwanted = True
        self.delete(pod, force=force)
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
            self.watchman.record_wiped(with_spec=not leaves_history)
            kept = (ANNOTATION_HISTORY, ANNOTATION_APPLIED) if leaves_history else ()
            self.job.annotations = {k: v for k, v in self.job.annotations.items() if k in kept}
            self._job_changed()

    def _the_job(self) -> SimJob:
        if self.job is None:
            raise ApiFailure(404, "the job is gone")
        return self.job

    def _job_changed(self) -> Body:
        job = self._the_job()
        job.version = self._bump()
        body = self.job_body()
        if job.deleted_at is not None and FINALIZER not in job.finalizers:
            self.job = None
            self._send("job", "DELETED", body)
            for pod in list(self.pods.values()):
                self.kernel.after(self.rng.uniform(1.0, 5.0), lambda p=pod: p.uid in self.pods and self.delete(p))
        else:
            self._send("job", "MODIFIED", body)
        return body

    # -- pods

    def delete(self, pod: SimPod, *, force: bool = False, disrupted: str = "") -> None:
        """Delete a pod as kubectl, the eviction API or a controller does."""
        if disrupted:
            pod.disrupted = disrupted
        if force or pod.node is None or pod.ended:
            self._drop(pod)
            return
        if pod.deleted_at is None:
            pod.deleted_at = self.kernel.now
            self._pod_changed(pod)
            self.kernel.spawn(self._terminate(pod))

    def _drop(self, pod: SimPod) -> None:
        """The object is gone; its kubelet, if it lives, ends the container."""
        if self.pods.pop(pod.uid, None) is None:
            return
        pod.version = self._bump()
        self._send("pod", "DELETED", pod.body())
        self.kernel.spawn(self._reap(pod))
        self.wake_scheduler()

    def _reap(self, pod: SimPod) -> Script:
        yield self.rng.uniform(0.2, 1.5)
        yield from self._until_kubelet_acts(pod)
        if pod.agent is not None and pod.node is not None and pod.node.powered:
            pod.agent.die()

    def _terminate(self, pod: SimPod) -> Script:
        yield self.rng.uniform(0.05, 0.8)
        yield from self._until_kubelet_acts(pod)
        deadline = (pod.deleted_at or 0.0) + pod.grace_s
        if pod.agent is not None and pod.agent.alive:
            pod.agent.sigterm()
        while pod.agent is not None and pod.agent.alive and self.kernel.now < deadline:
            yield 0.5
            yield from self._until_kubelet_acts(pod)
        if self.may_be_late and not pod.is_unwanted:
            self.watchman.touched(pod.name, math.inf)
            if pod.agent is not None:
                self.training.touched(pod.agent, "killed at the end of its grace")
        if pod.agent is not None and pod.agent.alive:
            pod.agent.die()
            pod.exit_code = 137
        if not pod.ended and pod.uid in self.pods:
            pod.phase = "Succeeded" if pod.exit_code == 0 else "Failed"
            self._pod_changed(pod)
        yield self.rng.uniform(0.05, 1.0)
        yield from self._until_kubelet_acts(pod)
        self._drop(pod)

    def report_end(self, pod: SimPod) -> Script:
        """A container ended: the kubelet writes the phase."""
        yield self.rng.uniform(0.1, 1.0)
        yield from self._until_kubelet_acts(pod)
        if pod.uid in self.pods and not pod.ended:
            pod.phase = "Succeeded" if pod.exit_code == 0 else "Failed"
            self._pod_changed(pod)
            self.wake_scheduler()

    def _until_kubelet_acts(self, pod: SimPod) -> Script:
        node = pod.node
        while node is not None and not self._responsive(node) and node.name in self.nodes:
            yield 1.0

    def _pod_changed(self, pod: SimPod, change: str = "MODIFIED") -> None:
        pod.version = self._bump()
        self._send("pod", change, pod.body())

    # -- scheduler and kubelets

    def wake_scheduler(self) -> None:
        """Something changed that may let a pod run."""
        self.kernel.after(self.rng.uniform(0.1, 0.4), self._schedule)

    def _schedule(self) -> None:
        taken = {pod.node.name for pod in self.pods.values() if pod.node is not None and not pod.ended}
        free = [n for n in self.nodes.values() if n.ready and not n.cordoned and not n.tainted and n.name not in taken]
        waiting = [pod for pod in self.pods.values() if pod.node is None and pod.deleted_at is None]
        for pod in waiting:
            node = next((n for n in free if n.name not in pod.avoids), None)
            if node is None:
                continue
            free.remove(node)
            pod.node, pod.placed_at = node, self.kernel.now
            self._pod_changed(pod)
            self.kernel.spawn(self._start_container(pod))

    def _start_container(self, pod: SimPod) -> Script:
        yield self.rng.uniform(0.5, 4.0)
        yield from self._until_kubelet_acts(pod)
        node = pod.node
        if node is None or pod.uid not in self.pods or pod.deleted_at is not None or node.name not in self.nodes:
            return
        if pod.ended:
            return
        pod.phase, pod.ip = "Running", f"10.0.0.{pod.uid.rpartition('-')[2]}"
        pod.agent = SimAgent(self.kernel, self.rng, self.training, pod, self.make)
        self._agents.append(pod.agent)
        self._pod_changed(pod)
        yield self.rng.uniform(0.05, 0.5)
        if self.kernel.now < node.sick_until:
            self.watchman.touched(pod.name, self.kernel.now + 120.0)
            pod.container_exits(1)
        else:
            pod.agent.begin()

    # -- nodes

    def add_node(self) -> SimNode:
        node = SimNode(f"node-{self._bump()}")
        self.nodes[node.name] = node
        self.node_changed(node, "ADDED")
        return node

    def node_changed(self, node: SimNode, change: str = "MODIFIED") -> None:
        """Tell of a node, and let the scheduler look."""
        node.version = self._bump()
        self._send("node", change, node.body())
        self.wake_scheduler()

    def delete_node(self, node: SimNode) -> None:
        """The machine and its object are gone; the garbage collector removes its pods after a while."""
        self.kill_node(node)
        del self.nodes[node.name]
        self.node_changed(node, "DELETED")
        for pod in self.on_node(node):
            self.kernel.after(self.rng.uniform(20.0, 60.0), lambda p=pod: self._drop(p))

    def kill_node(self, node: SimNode) -> None:
        """Power loss: everything there stops at once and says nothing."""
        node.powered = False
        for agent in self._agents:
            if agent.pod.node is node:
                agent.vanish()

    def return_node(self, node: SimNode) -> None:
        """The machine boots again: its containers are gone."""
        if node.powered:
            return
        node.powered = True
        for pod in list(self.pods.values()):
            if pod.node is node:
                self._lose_container(pod)

    def _lose_container(self, pod: SimPod) -> None:
        if pod.agent is not None:
            pod.agent.die()
        if pod.exit_code is None:
            pod.exit_code = 137
        self.kernel.spawn(self.report_end(pod))

    def agents(self) -> list[SimAgent]:
        """Give the agents that run."""
        return [agent for agent in self._agents if agent.alive]

    def on_node(self, node: SimNode) -> list[SimPod]:
        """Give the pods of a node."""
        return [pod for pod in self.pods.values() if pod.node is node]

    def _responsive(self, node: SimNode) -> bool:
        now = self.kernel.now
        return node.powered and node.frozen_until <= now and node.cut_until <= now

    def usable(self, node: SimNode) -> bool:
        """Whether a pod could run there now and for good."""
        return self._responsive(node) and node.ready and not node.cordoned and not node.tainted

    def _node_controller(self) -> Script:
        while True:
            yield 5.0
            for node in list(self.nodes.values()):
                self._judge(node)

    def _judge(self, node: SimNode) -> None:
        if self._responsive(node):
            node.silent_since = None
            if not node.ready:
                node.ready = True
                self.node_changed(node)
            return
        node.silent_since = self.kernel.now if node.silent_since is None else node.silent_since
        silent_s = self.kernel.now - node.silent_since
        if node.ready and silent_s >= NOT_READY_AFTER_S:
            node.ready = False
            self.node_changed(node)
        if silent_s >= EVICTION_AFTER_S:
            for pod in self.on_node(node):
                if pod.deleted_at is None and not pod.ended:
                    self.delete(pod, disrupted="DeletionByTaintManager")
