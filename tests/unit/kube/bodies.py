"""Bodies of objects as the API server gives them, cut down to what is read."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]

JOB_UID = "job-uid"
CREATED = "2026-03-01T12:00:00Z"


def job_body(spec: Body | None = None, *, version: int = 10, **meta: Any) -> Body:
    """Give a job; `spec` is laid over a small usable one."""
    template = {"spec": {"containers": [{"name": "train", "image": "train:1"}]}}
    usable = {
        "replicaSpecs": [{"name": "workers", "replicas": 2, "maxReplicas": 4, "template": template}],
        "elasticPolicy": {"minReplicas": 1},
        "elastipod": {"growth": "Maximum"},
    }
    metadata = {
        "name": "job",
        "namespace": "team",
        "uid": JOB_UID,
        "resourceVersion": str(version),
        "creationTimestamp": CREATED,
        **meta,
    }
    body: Body = {"metadata": metadata, "spec": {**usable, **(spec or {})}}
    if any(name.startswith("elastipod.io/") for name in meta.get("annotations") or ()):
        accepted = {
            "type": "Created",
            "status": "True",
            "reason": "Accepted",
            "message": "m",
            "lastTransitionTime": CREATED,
        }
        body["status"] = {"conditions": [accepted]}  # the operator that wrote them has told so, too
    return body


def pod_body(
    ordinal: int = 0, *, version: int = 20, node: str = "node-1", status: Body | None = None, **meta: Any
) -> Body:
    """Give a pod of that job."""
    name = f"job-workers-{ordinal}"
    labels = {
        "HPJob": "job",
        "elastipod.io/job-uid": JOB_UID,
        "elastipod.io/spec": "workers",
        "elastipod.io/ordinal": str(ordinal),
        "elastipod.io/incarnation": "0",
    }
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "creationTimestamp": CREATED,
        "labels": labels,
        "ownerReferences": [{"kind": "HyperPodPyTorchJob", "name": "job", "uid": JOB_UID, "controller": True}],
        **meta,
    }
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": status or {"phase": "Running"}}


def container(name: str = "train", /, **state: Body) -> Body:
    """Give the status of a container."""
    return {"name": name, "image": "train:1", "state": state}


def node_body(name: str = "node-1", *, ready: str = "True", taints: list[Body] | None = None, **changes: Any) -> Body:
    """Give a node."""
    return {
        "metadata": {"name": name, "labels": changes.pop("labels", {}), "resourceVersion": "5"},
        "spec": {"taints": taints, **changes},
        "status": {"conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": ready}]},
    }
