"""The queues that manifests in compat/ name, each with room for all: what their clusters have already.

The queue with a topology has nodes of its own, marked and tainted, as Kueue asks for: it places pods on hosts, and pods that
come from elsewhere would be faster there.
"""

from __future__ import annotations

from typing import Any

from tests.api.kueue_objects import API

from elastipod_local.cluster import Cluster

# One with a topology, as HyperPod task governance makes it; the others without.
TOPOLOGY = "hyperpod"
POOL = "example.com/pool"
TOLERATION = {"key": POOL, "operator": "Exists", "effect": "NoSchedule"}
QUEUES = {"team-a-localqueue": TOPOLOGY, "gpu-queue": "", "user-queue": ""}
CLASSES = {"training-priority": 75, "p1": 10}
ROOM = {"cpu": "10000", "memory": "100Ti", "nvidia.com/gpu": "2000", "vpc.amazonaws.com/efa": "5000"}


def compat_queues(namespace: str) -> list[dict[str, Any]]:
    """Give the queues, flavors and priority classes to be applied."""
    levels = [{"nodeLabel": "topology.k8s.aws/network-node-layer-3"}, {"nodeLabel": "kubernetes.io/hostname"}]
    found = [_body("Topology", TOPOLOGY, {"levels": levels})]
    for name, topology in QUEUES.items():
        flavor = {"nodeLabels": {POOL: topology}, "tolerations": [TOLERATION], "topologyName": topology}
        resources = [{"name": resource, "nominalQuota": quota} for resource, quota in ROOM.items()]
        group = {"coveredResources": list(ROOM), "flavors": [{"name": name, "resources": resources}]}
        spec = {
            "namespaceSelector": {},
            "resourceGroups": [group],
            "preemption": {"withinClusterQueue": "LowerPriority"},
        }
        found += [
            _body("ResourceFlavor", name, flavor if topology else {}),
            _body("ClusterQueue", name, spec),
            _body("LocalQueue", name, {"clusterQueue": name}, namespace=namespace),
        ]
    classes = [
        {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": n}, "value": v}
        for n, v in CLASSES.items()
    ]
    return [*found, *classes]


def set_apart(cluster: Cluster, nodes: list[str]) -> None:
    """Give nodes to the queue with a topology."""
    cluster.kubectl("label", "nodes", *nodes, f"{POOL}={TOPOLOGY}")
    cluster.kubectl("taint", "nodes", *nodes, f"{POOL}={TOPOLOGY}:NoSchedule")


def _body(kind: str, name: str, spec: dict[str, Any], **meta: str) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name, **meta}, "spec": spec}
