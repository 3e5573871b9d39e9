"""Jobs and pods of the load benchmark, and where they are at the API server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.operator_load.cluster import NAMESPACE

from elastipod_operator.core.names import API_VERSION, KIND, PLURAL

JOBS = f"/apis/{API_VERSION}/namespaces/{NAMESPACE}/{PLURAL}"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
BATCH_JOBS = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs"
BARE_LABEL = "bench-job"


def job(name: str, pods: int, node: str, agent_port: int, **spec: Any) -> dict[str, Any]:
    """Give a job of so many pods, all bound to one played node: a scheduler would only be one more to wait for."""
    container = {
        "name": "trainer", "image": "train:1", "command": ["hyperpodrun", "--nnodes=1", "train.py"],
        "resources": {"limits": {"cpu": "8", "memory": "64Gi"}},
    }  # fmt: skip
    template = {"spec": {"nodeName": node, "terminationGracePeriodSeconds": 30, "containers": [container]}}
    return {
        "apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "nprocPerNode": "8",
            "replicaSpecs": [{"name": "pods", "replicas": pods, "template": template}],
            "elastipod": {"agentPort": agent_port},
            **spec,
        },
    }  # fmt: skip


def batch_job(like: Mapping[str, Any], name: str, pods: int) -> dict[str, Any]:
    """Give a Job of Kubernetes with so many pods as the operator made them, as JobSet has one for each group of replicas."""
    template = bare_pod(like, name, name)
    template["spec"] |= {"restartPolicy": "Never"}
    for key in ("hostname", "subdomain"):  # the controller names its pods itself
        template["spec"].pop(key, None)
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "completionMode": "Indexed", "completions": pods, "parallelism": pods, "backoffLimit": 0,
            "template": {
                "metadata": {key: template["metadata"][key] for key in ("labels", "annotations")},
                "spec": template["spec"],
            },
        },
    }  # fmt: skip


def bare_pod(like: Mapping[str, Any], group: str, name: str) -> dict[str, Any]:
    """Give a pod as the operator made it, but of nobody: without owner and labels that anybody looks at."""
    spec = {
        key: value for key, value in like["spec"].items() if key not in ("serviceAccount", "priority", "tolerations")
    }
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {BARE_LABEL: group},
                     "annotations": like["metadata"].get("annotations", {})},
        "spec": spec,
    }  # fmt: skip
