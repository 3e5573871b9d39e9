"""Bodies of Kueue's objects as the API server gives them, cut down to what is read."""

from __future__ import annotations

from typing import Any

from tests.unit.kube.bodies import CREATED, JOB_UID

from elastipod_operator.core.names import workload_name

Body = dict[str, Any]
LATER = "2026-03-01T12:01:00Z"


def condition(kind: str, status: bool = True, reason: str = "Because", message: str = "because") -> Body:
    """Give a condition."""
    text = "True" if status else "False"
    return {"type": kind, "status": text, "reason": reason, "message": message, "lastTransitionTime": LATER}


def admitted(*more: Body) -> list[Body]:
    """Give the conditions of an admitted Workload."""
    return [condition("QuotaReserved"), condition("Admitted"), *more]


def workload_body(
    number: int = 0,
    *,
    pods: int = 2,
    version: int = 30,
    status: Body | None = None,
    spec: Body | None = None,
    **meta: Any,
) -> Body:
    """Give a Workload of the job of `job_body`, admitted on flavor `gpus` where no status says otherwise."""
    assignment = {"name": "workers", "flavors": {"cpu": "gpus", "nvidia.com/gpu": "gpus"}, "count": pods}
    granted = {"admission": {"clusterQueue": "team", "podSetAssignments": [assignment]}, "conditions": admitted()}
    template = {"spec": {"containers": [{"name": "train"}]}}
    name = workload_name("job", JOB_UID, number)
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "generation": 1,
        "creationTimestamp": CREATED,
        "labels": {"elastipod.io/share": str(number), "kueue.x-k8s.io/job-uid": JOB_UID, "HPJob": "job"},
        "ownerReferences": [{"kind": "HyperPodPyTorchJob", "name": "job", "uid": JOB_UID, "controller": True}],
        **meta,
    }
    asked = {"queueName": "gpus", "priority": 0, "podSets": [{"name": "workers", "count": pods, "template": template}]}
    return {
        "kind": "Workload", "metadata": metadata, "spec": {**asked, **(spec or {})},
        "status": granted if status is None else status,
    }  # fmt: skip


def flavor_body(
    name: str = "gpus", labels: dict[str, str] | None = None, tolerations: list[Body] | None = None
) -> Body:
    """Give a ResourceFlavor."""
    spec = {"nodeLabels": labels or {}, "tolerations": tolerations or []}
    return {"metadata": {"name": name}, "spec": spec}
