"""The queues of a churn, and the paths of what its history is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from tests.api.kueue_objects import API
from tests.api.quota_checker import JOB, POD, WORKLOAD

KIND = "ml.g6e.12xlarge"
NODE_LABELS = {"node.kubernetes.io/instance-type": KIND}
COOKBOOK = Path(__file__).resolve().parents[2] / "examples" / "kueue" / "cohort.yaml"
QUEUES = "abc"
CLASSES = {"churn-low": -100, "churn-normal": 0, "churn-high": 1000}


def queue_objects(namespace: str, cpus: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Give the queues of one cohort, with the settings that the cookbook recommends, and the quota of each ClusterQueue."""
    documents = yaml.safe_load_all(COOKBOOK.read_text(encoding="utf-8"))
    recommended = next(d for d in documents if d["kind"] == "ClusterQueue")["spec"]
    resources = [{"name": "cpu", "nominalQuota": cpus}]
    groups = [{"coveredResources": ["cpu"], "flavors": [{"name": namespace, "resources": resources}]}]
    own = {"cohortName": namespace, "namespaceSelector": {}, "resourceGroups": groups}
    names = [f"{namespace}-{letter}" for letter in QUEUES]
    found = [_body("ResourceFlavor", namespace, spec={"nodeLabels": NODE_LABELS})]
    for name in names:
        found.append(_body("ClusterQueue", name, spec={**recommended, **own}))
        found.append(_body("LocalQueue", name, namespace, spec={"clusterQueue": name}))
    found += [_body("WorkloadPriorityClass", name, value=value) for name, value in CLASSES.items()]
    return found, {name: 1000 * cpus for name in names}


def _body(kind: str, name: str, namespace: str = "", **rest: Any) -> dict[str, Any]:
    where = {"namespace": namespace} if namespace else {}
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name, **where}, **rest}


def watched_paths(namespace: str) -> dict[str, str]:
    """Give the paths of all that a churn's history is made of."""
    return {
        POD: f"/api/v1/namespaces/{namespace}/pods",
        WORKLOAD: f"/apis/{API}/namespaces/{namespace}/workloads",
        JOB: _jobs_path(namespace),
    }


def _jobs_path(namespace: str) -> str:
    return f"/apis/sagemaker.amazonaws.com/v1/namespaces/{namespace}/hyperpodpytorchjobs"
