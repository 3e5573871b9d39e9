"""Queues and Workloads for tests with a real Kueue, and how to wait for what Kueue makes of them."""

from __future__ import annotations

import json
from typing import Any

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until
from elastipod_local.kueue_config import KueueOptions

API = "kueue.x-k8s.io/v1beta2"
DEADLINE_S = 30
FAIR_KUEUE = KueueOptions(
    frameworks=("batch/job", "pod"),
    settings={"fairSharing": {"preemptionStrategies": ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]}},
)


def queues(name: str, namespace: str, *, cpu: str = "4", **spec: Any) -> list[dict[str, Any]]:
    """Give a ResourceFlavor, a ClusterQueue with `cpu` of quota and a LocalQueue, all called `name`.

    spec: further fields of the ClusterQueue's spec, as `preemption` or `cohortName`.
    """
    flavor = {"name": name, "resources": [{"name": "cpu", "nominalQuota": cpu}]}
    groups = [{"coveredResources": ["cpu"], "flavors": [flavor]}]
    return [
        {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": name}},
        {
            "apiVersion": API,
            "kind": "ClusterQueue",
            "metadata": {"name": name},
            "spec": {"namespaceSelector": {}, "resourceGroups": groups, **spec},
        },
        {
            "apiVersion": API,
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterQueue": name},
        },
    ]


def pod_spec(**requests: str) -> dict[str, Any]:
    """Give the spec of a pod that asks for these resources and ends at once where there is a node for it."""
    container = {"name": "main", "image": "elastipod/train:dev", "command": ["true"]}
    return {"restartPolicy": "Never", "containers": [{**container, "resources": {"requests": requests}}]}


def workload(name: str, namespace: str, queue: str, *, count: int = 1, **requests: str) -> dict[str, Any]:
    """Give a Workload of `count` pods that ask for these resources each, one CPU when none is named."""
    pod_set = {"name": "main", "count": count, "template": {"spec": pod_spec(**(requests or {"cpu": "1"}))}}
    return {
        "apiVersion": API,
        "kind": "Workload",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"queueName": queue, "podSets": [pod_set]},
    }


def batch_job(name: str, namespace: str, queue: str, *, cpu: str) -> dict[str, Any]:
    """Give a Job of one pod that is handed in to a queue."""
    metadata = {"name": name, "namespace": namespace, "labels": {"kueue.x-k8s.io/queue-name": queue}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {"template": {"spec": pod_spec(cpu=cpu)}},
    }


def apply(cluster: Cluster, *objects: dict[str, Any]) -> None:
    """Apply objects; raises CommandError with the refusal."""
    cluster.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}))


def condition(cluster: Cluster, namespace: str, kind: str, name: str, condition_type: str) -> dict[str, Any]:
    """Give a condition of an object, empty while it has none of the type."""
    body = json.loads(cluster.kubectl("-n", namespace, "get", kind, name, "-o", "json"))
    found: list[dict[str, Any]] = [
        entry for entry in body.get("status", {}).get("conditions", []) if entry["type"] == condition_type
    ]
    return found[0] if found else {}


def wait_for(
    cluster: Cluster, namespace: str, kind: str, name: str, condition_type: str, status: str = "True"
) -> dict[str, Any]:
    """Wait until a condition has this status and give it."""

    def reached() -> dict[str, Any] | None:
        found = condition(cluster, namespace, kind, name, condition_type)
        return found if found.get("status") == status else None

    what = f"{kind} {name} to be {condition_type}={status}"
    return wait_until(reached, deadline_s=DEADLINE_S, what=what, every_s=0.1)
