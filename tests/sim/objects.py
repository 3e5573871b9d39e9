"""What the API server of the model holds: nodes, pods with the agents in them, the job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.sim.agents import SimAgent
from tests.sim.authentication import secret_of
from tests.sim.kernel import EPOCH, format_time

from elastipod_operator.kube.observed_node import HEALTH_LABEL

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

NAMESPACE = "team"

Body = dict[str, Any]


@dataclass(slots=True)
class SimNode:
    """A machine. until: virtual times; what lasts until then ends by itself.

    frozen: all stands still. cut: nobody can reach it. hidden, deaf, mute: only the operator cannot; deaf: its calls do not
    arrive, mute: their answers and all states do not.
    """

    name: str
    powered: bool = True
    ready: bool = True
    changed_at: float = 0.0
    """When it became ready, or ceased to be."""
    cordoned: bool = False
    cordoned_at: float = 0.0
    tainted: bool = False
    notice: str = ""
    """The taint by which its end is announced."""
    health: str = ""
    """HyperPod's label of its health, which no scheduler heeds."""
    is_gpu_sick: bool = False
    """Whether it has the condition GpuUnhealthy, which no scheduler heeds either."""
    closed_at: float = 0.0
    """When one of these two came up."""
    out_of_service: bool = False
    frozen_until: float = 0.0
    cut_until: float = 0.0
    hidden_until: float = 0.0
    deaf_until: float = 0.0
    mute_until: float = 0.0
    sick_until: float = 0.0
    apart_until: dict[str, float] = field(default_factory=dict)
    """Until when it and other nodes cannot reach each other, by their names."""
    silent_since: float | None = None
    version: int = 0

    def body(self) -> Body:
        taints = [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}] if self.tainted else []
        if self.notice:
            taints.append({"key": self.notice, "effect": "NoSchedule"})
        if self.out_of_service:
            taints.append({"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"})
        return {
            "metadata": {
                "name": self.name,
                "resourceVersion": str(self.version),
                "labels": {"kubernetes.io/hostname": self.name, **({HEALTH_LABEL: self.health} if self.health else {})},
            },
            "spec": {"unschedulable": self.cordoned, "taints": taints},
            "status": {
                "conditions": [
                    {"type": "Ready", "status": "True" if self.ready else "Unknown"},
                    {"type": "GpuUnhealthy", "status": "True" if self.is_gpu_sick else "False"},
                ],
                "allocatable": {"pods": "1"},
            },
        }


def avoided_by(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Give the nodes that a pod must not be placed on, as the scheduler reads it."""
    affinity = (manifest["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    demands = [demand for term in terms for demand in term.get("matchFields") or ()]
    return frozenset(d["values"][0] for d in demands if (d["key"], d["operator"]) == ("metadata.name", "NotIn"))


def restricted_to(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Give the nodes that a pod must be placed on, as the scheduler reads it; empty for any."""
    affinity = (manifest["spec"].get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}).get("nodeSelectorTerms") or ()
    demands = [demand for term in terms for demand in term.get("matchExpressions") or ()]
    return frozenset(name for d in demands if d["key"] == "kubernetes.io/hostname" for name in d["values"])


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
        self.is_end_reported = False
        """The kubelet has written that the container ended; the phase follows later."""
        self.containers: list[Body] = manifest["spec"]["containers"]
        given = {one["name"]: one.get("value") for one in self.containers[0].get("env") or ()}
        self.nproc = int(given["NPROC_PER_NODE"])
        """Workers that its agent starts."""
        self.has_sidecar = len(self.containers) > 1
        self.is_restarted: bool = self.containers[0].get("restartPolicy") == "OnFailure"
        """Its kubelet starts the agent's container again when it failed."""
        self.restarts = 0
        self.lacks_secret = False
        """Its container waits for a Secret."""
        self.deleted_at: float | None = None
        self.disrupted = ""
        self.annotations: dict[str, str] = dict(meta.get("annotations") or {})
        self.image: str = manifest["spec"]["containers"][0].get("image", "")
        self.avoids = avoided_by(manifest)
        self.only_on = restricted_to(manifest)
        self.selector: dict[str, str] = dict(manifest["spec"].get("nodeSelector") or {})
        self.is_unwanted = False
        """The operator itself deleted it."""
        self.agent: SimAgent | None = None

    @property
    def ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    def body(self) -> Body:
        meta: Body = {
            "name": self.name, "namespace": self._cluster.namespace, "uid": self.uid, "labels": self.labels,
            "annotations": self.annotations, "resourceVersion": str(self.version),
            "creationTimestamp": format_time(self._cluster.utc(self.created_at)),
            "ownerReferences": self.owners,
        }  # fmt: skip
        if self.deleted_at is not None:
            meta["deletionTimestamp"] = format_time(self._cluster.utc(self.deleted_at + self.grace_s))
            meta["deletionGracePeriodSeconds"] = int(self.grace_s)
        status: Body = {"phase": self.phase, "podIP": self.ip, "conditions": []}
        if self.disrupted:
            status["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": self.disrupted}]
        if self.ended or self.is_end_reported or self.lacks_secret or self.phase == "Running":
            status["containerStatuses"] = self._containers()
        return {
            "kind": "Pod",
            "metadata": meta,
            "spec": {"nodeName": self.node.name if self.node else "", "containers": self.containers},
            "status": status,
        }

    def _containers(self) -> list[Body]:
        """Give the states of its containers by name, as kubelets do."""
        running: Body = {"running": {"startedAt": format_time(EPOCH)}}
        has_ended = self.ended or self.is_end_reported
        state = {"terminated": {"exitCode": self.exit_code or 0}} if has_ended else running
        if self.lacks_secret:
            state = {"waiting": {"reason": "CreateContainerConfigError", "message": "secret not found"}}
        mine = {"name": "train", "ready": not has_ended, "state": state, "restartCount": self.restarts}
        beside = {
            "name": "a-sidecar",
            "ready": not self.ended,
            "state": {"terminated": {"exitCode": 0}} if self.ended else running,
        }
        return [beside, mine] if len(self.containers) > 1 else [mine]

    def has_key(self) -> bool:
        """Whether its agent gets a key from a Secret."""
        return bool(secret_of(self.containers[0]))

    def node_runs(self) -> bool:
        """Whether its node is on, awake and connected to the other nodes."""
        node, now = self.node, self._cluster.kernel.now
        return node is not None and node.powered and node.frozen_until <= now and node.cut_until <= now

    def hears(self) -> bool:
        """Whether the operator's calls arrive at its agent."""
        node, now = self.node, self._cluster.kernel.now
        return self._is_open() and node is not None and node.hidden_until <= now and node.deaf_until <= now

    def answers(self) -> bool:
        """Whether answers of its agent arrive at the operator."""
        node, now = self.node, self._cluster.kernel.now
        return self._is_open() and node is not None and node.hidden_until <= now and node.mute_until <= now

    def reaches(self, other: SimPod) -> bool:
        """Whether its agent gets an answer from the agent of another pod."""
        return self._is_open() and other._is_open() and not self.is_apart_from(other)

    def is_apart_from(self, other: SimPod) -> bool:
        """Whether their nodes cannot reach each other though both run."""
        if self.node is None or other.node is None:
            return False
        return self.node.apart_until.get(other.node.name, 0.0) > self._cluster.kernel.now

    def refuses(self) -> bool:
        """Whether its network tells the operator that nobody listens on the agent's port."""
        if self.agent is None or self.agent.alive or not self.node_runs() or self.ended:
            return False
        return not self.is_mute()

    def is_mute(self) -> bool:
        """Whether nothing that its node sends arrives at the operator."""
        node = self.node
        return node is not None and max(node.hidden_until, node.mute_until) > self._cluster.kernel.now

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
