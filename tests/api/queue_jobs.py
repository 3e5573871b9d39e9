"""Jobs in queues of a real Kueue: how they are handed in, and what is seen of them, their pods and their Workloads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.api.jobs import apply, get
from tests.api.jobs import job as plain_job
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until

# Nodes that no other test of the same cluster plays.
KIND = "ml.c5.4xlarge"
FLAVOR_LABELS = {"node.kubernetes.io/instance-type": KIND}
TOLERATION = {"key": "reserved", "operator": "Equal", "value": "gpus", "effect": "NoSchedule"}
Body = dict[str, Any]


class Team:
    """One namespace with jobs in queues."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def submit(self, name: str, *, queue: str | None = None, labels: dict[str, str] | None = None, **spec: Any) -> None:
        """Hand in a job whose pods take a CPU each. queue: by default the one called like the namespace; "" for none."""
        body = plain_job(name, **{"elasticPolicy": QUICK, "elastipod": {"minStableSeconds": 0}, **spec})
        wanted = self.namespace if queue is None else queue
        named = {"kueue.x-k8s.io/queue-name": wanted} if wanted else {}
        body["metadata"]["labels"] = {**named, **(labels or {})}
        for one in body["spec"]["replicaSpecs"]:
            one["template"] = one.get("template") or {}
            resources = {"requests": {"cpu": "1"}}
            container = {
                "name": "trainer",
                "image": "train:1",
                "command": ["hyperpodrun", "train.py"],
                "resources": resources,
            }
            # Without a queue there is no flavor that says where they run.
            pod = {"containers": [container], **({} if wanted else {"nodeSelector": FLAVOR_LABELS})}
            own = one["template"].get("spec", {})
            one["template"] = {"metadata": one["template"].get("metadata", {}), "spec": {**own, **pod}}
        apply(self.cluster, self.namespace, body)

    def state(self, name: str) -> Body:
        """Give the last condition of a job."""
        conditions = get(self.cluster, self.namespace, name).get("status", {}).get("conditions") or [{}]
        last: Body = conditions[-1]
        return last

    def size(self, name: str) -> str:
        """Give running/target/max."""
        return str(
            get(self.cluster, self.namespace, name)["metadata"].get("annotations", {}).get("elastipod.io/size", "")
        )

    def patch(self, name: str, **spec: Any) -> None:
        """Edit a job."""
        text = json.dumps({"spec": spec})
        self.cluster.kubectl("-n", self.namespace, "patch", "hpjob", name, "--type=merge", "-p", text)

    def pods(self, name: str) -> list[Body]:
        """Give the pods of a job."""
        return self._list("pods", f"HPJob%3D{name}")

    def workloads(self, name: str) -> dict[int, Body]:
        """Give the Workloads of a job by number."""
        found = self._list("workloads", f"HPJob%3D{name}")
        return {int(body["metadata"]["labels"]["elastipod.io/share"]): body for body in found}

    def warning(self, name: str) -> str:
        """Give all that a job is warned of; empty for nothing."""
        found = get(self.cluster, self.namespace, name).get("status", {}).get("conditions") or ()
        return next((str(c["message"]) for c in found if c["type"] == "Warning"), "")

    def warned_of(self, name: str) -> set[str]:
        """Give the reasons of the warnings among a job's Events."""
        found = list_objects(self.cluster, "events", self.namespace, fieldSelector="type%3DWarning")
        return {e["reason"] for e in found if e["involvedObject"]["name"] == name}

    def trains(self, name: str, size: int) -> None:
        """Wait until a job trains at a size."""

        def does() -> bool:
            state = self.state(name)
            return (
                state.get("type") == "Running"
                and state["reason"] == "Training"
                and self.size(name).startswith(f"{size}/")
            )

        self.until(does, f"{name} to train at {size}", name)

    def waits(self, name: str, reason: str = "") -> Body:
        """Wait until a job is suspended, for a reason, and give the condition."""

        def does() -> Body | None:
            state = self.state(name)
            return state if state.get("type") == "Suspended" and (not reason or state["reason"] == reason) else None

        condition: Body = self.until(does, f"{name} to be Suspended {reason}", name)
        return condition

    def until(self, holds: Callable[[], Any], what: str, name: str) -> Any:
        """Wait, and tell what there was of a job when that was in vain."""

        def told() -> str:
            job, workloads = get(self.cluster, self.namespace, name), self.workloads(name)
            status = {number: body.get("status", {}).get("conditions") for number, body in workloads.items()}
            return json.dumps(
                {"job": job["metadata"].get("annotations"), "status": job.get("status"), "workloads": status}
            )

        try:
            return wait_until(holds, deadline_s=PATIENCE_S, what=what, every_s=0.1)
        except Exception as error:
            raise AssertionError(f"{error}: {told()}") from error

    def _list(self, kind: str, selector: str) -> list[Body]:
        return list_objects(self.cluster, kind, self.namespace, labelSelector=selector)


QUICK = {
    "minReplicas": 2, "maxReplicas": 4, "scalingTimeoutInSeconds": 0, "gracefulShutdownTimeoutInSeconds": 2,
}  # fmt: skip


def conditions(workload: Body) -> dict[str, str]:
    """Give the status of each condition of a Workload."""
    return {c["type"]: c["status"] for c in workload.get("status", {}).get("conditions", ())}
