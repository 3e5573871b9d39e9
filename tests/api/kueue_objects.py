"""Queues and Workloads for tests with a real Kueue, and how to wait for what Kueue makes of them."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import yaml
from tests.objects import get_object, list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until
from elastipod_local.kueue_config import KueueOptions

API = "kueue.x-k8s.io/v1beta2"
COOKBOOK = Path(__file__).resolve().parents[2] / "examples" / "kueue"
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


def let_a_second_pass() -> None:
    """Make who comes next the newer one for Kueue, whose times are whole seconds."""
    time.sleep(1.1)


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


def is_converted_by_kueue(cluster: Cluster) -> bool:
    """Tell whether Workloads can be read and deleted only while Kueue is there: 0.15 stores them in an older version."""
    path = "jsonpath={.spec.versions[?(@.storage==true)].name}"
    return cluster.kubectl("get", "crd", "workloads.kueue.x-k8s.io", "-o", path) != API.rpartition("/")[2]


def condition(cluster: Cluster, namespace: str, kind: str, name: str, condition_type: str) -> dict[str, Any]:
    """Give a condition of an object, empty while it has none of the type."""
    body = get_object(cluster, f"{kind.lower()}s", name, namespace)
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
    return wait_until(reached, deadline_s=PATIENCE_S, what=what, every_s=0.1)


class Layout:
    """A layout of the cookbook under names of its own, so that several fit in one cluster."""

    def __init__(self, cluster: Cluster, file: str, prefix: str) -> None:
        self.cluster = cluster
        self._prefix = prefix
        text = (COOKBOOK / file).read_text()
        for name in ("team-", "gpu-", "pool"):
            text = text.replace(name, f"{prefix}-{name}")
        text = text.replace("cohortName: training", f"cohortName: {prefix}-training")
        self.objects: list[dict[str, Any]] = list(yaml.safe_load_all(text))
        apply(cluster, *self.objects)

    def wait_until_active(self) -> None:
        for item in self.objects:
            if item["kind"] in ("ClusterQueue", "LocalQueue"):
                metadata = item["metadata"]
                namespace = metadata.get("namespace", "default")
                assert wait_for(self.cluster, namespace, item["kind"], metadata["name"], "Active")["reason"] == "Ready"

    def namespace(self, team: str) -> str:
        return f"{self._prefix}-team-{team}"

    def ask(self, team: str, name: str, gpus: int, priority: int = 0) -> None:
        """Ask for a gang of `gpus` pods with one GPU each."""
        resources = {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": "1"}
        body = workload(name, self.namespace(team), "training", count=gpus, **resources)
        body["spec"]["priority"] = priority
        apply(self.cluster, body)

    def admit(self, team: str, name: str, gpus: int, priority: int = 0) -> None:
        """Ask and wait for the answer, so that what is asked for later is newer for Kueue too."""
        self.ask(team, name, gpus, priority)
        wait_for(self.cluster, self.namespace(team), "workload", name, "Admitted")

    def wait_for_decision(self, team: str, name: str) -> str:
        """Wait until Kueue has looked at a Workload that it cannot admit as things are, and give what it says."""
        found = wait_for(self.cluster, self.namespace(team), "workload", name, "QuotaReserved", "False")
        return str(found["message"])

    def evicted(self) -> set[str]:
        """Give the names of the Workloads that hold quota which Kueue wants back."""
        found: set[str] = set()
        teams = {item["metadata"]["name"] for item in self.objects if item["kind"] == "Namespace"}
        for namespace in teams:
            for item in list_objects(self.cluster, "workloads", namespace):
                states = {entry["type"]: entry["status"] for entry in item.get("status", {}).get("conditions", [])}
                if states.get("Evicted") == states.get("QuotaReserved") == "True":
                    found.add(item["metadata"]["name"])
        return found

    def wait_for_eviction(self) -> set[str]:
        return wait_until(self.evicted, deadline_s=PATIENCE_S, what="an eviction")

    def release(self, team: str, *names: str) -> None:
        """Give quota back as the operator does for increments."""
        self.cluster.kubectl("-n", self.namespace(team), "delete", "workload", *names)


def lay_out(cluster: Cluster, file: str) -> Layout:
    """Apply a layout and wait until all its queues are active."""
    layout = Layout(cluster, file, f"c{uuid.uuid4().hex[:6]}")
    layout.wait_until_active()
    return layout
