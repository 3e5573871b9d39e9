"""Pods that the cluster will not have: each reason is told in the API server's own words, tried again, and ends no job."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.api.compat_lives import operator, size_of
from tests.api.compat_nodes import PlayedNodes
from tests.api.jobs import apply, get, job
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.errors import CommandError
from elastipod_local.host import wait_until

ADMISSION = "admissionregistration.k8s.io/v1"
CREATIONS = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}


def made(kind: str, name: str, namespace: str = "", api: str = ADMISSION, **fields: Any) -> dict[str, Any]:
    """Give an object."""
    place = {"namespace": namespace} if namespace else {}
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, **place}, **fields}


def quota(namespace: str) -> list[dict[str, Any]]:
    """A namespace that may use two GPUs."""
    return [made("ResourceQuota", "team", namespace, "v1", spec={"hard": {"requests.nvidia.com/gpu": "2"}})]


def limits(namespace: str) -> list[dict[str, Any]]:
    """A namespace whose containers may have less than these want."""
    limit = {"type": "Container", "max": {"cpu": "500m"}}
    return [made("LimitRange", "team", namespace, "v1", spec={"limits": [limit]})]


def policy(namespace: str) -> list[dict[str, Any]]:
    """A policy that forbids the third pod and those after it."""
    forbids = {
        "expression": "!(object.metadata.labels['elastipod.io/ordinal'] in ['2', '3'])",
        "message": "two pods are enough",
    }
    spec = {"matchConstraints": {"resourceRules": [CREATIONS]}, "validations": [forbids]}
    binding = {"policyName": namespace, "validationActions": ["Deny"], "matchResources": only_in(namespace)}
    return [
        made("ValidatingAdmissionPolicy", namespace, spec=spec),
        made("ValidatingAdmissionPolicyBinding", namespace, spec=binding),
    ]


def webhook(namespace: str) -> list[dict[str, Any]]:
    """A webhook that must be asked about the same pods, and that nobody serves."""
    ordinals = {"key": "elastipod.io/ordinal", "operator": "In", "values": ["2", "3"]}
    hook = {
        "name": "pods.example.com", "rules": [CREATIONS], "clientConfig": {"url": "https://127.0.0.1:9/pods"},
        "admissionReviewVersions": ["v1"], "sideEffects": "NoneOnDryRun", "failurePolicy": "Fail", "timeoutSeconds": 1,
        **only_in(namespace), "objectSelector": {"matchExpressions": [ordinals]},
    }  # fmt: skip
    return [made("ValidatingWebhookConfiguration", namespace, webhooks=[hook])]


def only_in(namespace: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}


# What stands in the way, how many replicas can train all the same, and part of what the API server says.
REFUSALS: dict[str, tuple[Callable[[str], list[dict[str, Any]]], int, str]] = {
    "refused-by-quota": (quota, 2, "exceeded quota: team, requested: requests.nvidia.com/gpu=1"),
    "refused-by-limits": (limits, 0, "maximum cpu usage per Container is 500m"),
    "refused-by-policy": (policy, 2, "two pods are enough"),
    "refused-by-webhook": (webhook, 2, 'failed calling webhook "pods.example.com"'),
}


def elastic() -> dict[str, Any]:
    wants = {"cpu": "1", "nvidia.com/gpu": "1"}
    container = {"name": "trainer", "image": "train:1", "resources": {"requests": wants, "limits": wants}}
    spec = {"name": "pods", "replicas": 2, "maxReplicas": 4, "template": {"spec": {"containers": [container]}}}
    policy = {"minReplicas": 2, "maxReplicas": 4, "scalingTimeoutInSeconds": 0, "gracefulShutdownTimeoutInSeconds": 1}
    return job(replica_specs=[spec], elasticPolicy=policy, elastipod={"minStableSeconds": 0})


def listed(bodies: list[dict[str, Any]]) -> str:
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})


def is_refused(cluster: Cluster, namespace: str, words: str) -> bool:
    """Whether the API server refuses such a pod by now: policies and webhooks act a moment after they were made."""
    containers = elastic()["spec"]["replicaSpecs"][0]["template"]["spec"]["containers"]
    pod = made("Pod", "probe", api="v1", spec={"containers": containers})
    pod["metadata"]["labels"] = {"elastipod.io/ordinal": "2"}
    try:
        cluster.kubectl("-n", namespace, "create", "--dry-run=server", "-f", "-", input=json.dumps(pod))
    except CommandError as refused:
        return words in refused.output
    return False


def condition(body: dict[str, Any], kind: str) -> dict[str, Any]:
    conditions = (body.get("status") or {}).get("conditions") or []
    found: dict[str, Any] = next((c for c in conditions if c["type"] == kind), {})
    return found


@pytest.mark.slow
def test_refused_pods_are_told_of_tried_again_and_end_no_job(api_server: Cluster, tmp_path: Path) -> None:
    for namespace, (obstacle, _, _) in REFUSALS.items():
        api_server.kubectl("create", "namespace", namespace)
        api_server.kubectl("apply", "-f", "-", input=listed(obstacle(namespace)))
    for namespace in ("refused-by-limits", "refused-by-policy", "refused-by-webhook"):
        words = REFUSALS[namespace][2]
        wait_until(
            lambda namespace=namespace, words=words: is_refused(api_server, namespace, words),  # type: ignore[misc]
            deadline_s=PATIENCE_S, what=f"the API server to refuse pods in {namespace}",
        )  # fmt: skip
    counted = ("resourcequota/team", r"--for=jsonpath={.status.hard.requests\.nvidia\.com/gpu}=2", "--timeout=240s")
    api_server.kubectl("-n", "refused-by-quota", "wait", *counted)
    with (
        PlayedNodes(api_server.kubeconfig, {"ml.p5.48xlarge": 2}, {}),
        operator(api_server, tmp_path, tuple(REFUSALS)),
    ):
        for namespace in REFUSALS:
            apply(api_server, namespace, elastic())

        def are_told_of() -> bool:
            found = {namespace: get(api_server, namespace) for namespace in REFUSALS}
            return all(
                words in condition(found[namespace], "PodsReady").get("message", "")
                and size_of(found[namespace]) == size
                for namespace, (_, size, words) in REFUSALS.items()
            )

        wait_until(
            are_told_of, deadline_s=PATIENCE_S, what="all to be told of, and to train where they can", every_s=0.5
        )
        for namespace, (obstacle, size, words) in REFUSALS.items():
            body = get(api_server, namespace)
            assert condition(body, "PodsReady")["reason"] == "PodsRefused"
            state = body["status"]["conditions"][-1]
            assert (state["type"], body["status"]["restartCount"]) == ("Running" if size else "Created", 0)
            if size:
                scaling = condition(body, "Scaling")
                assert (scaling["reason"], words in scaling["message"]) == ("LimitReached", True)
            api_server.kubectl("delete", "-f", "-", input=listed(obstacle(namespace)))

        def train_all() -> bool:
            return all(size_of(get(api_server, namespace)) == 4 for namespace in REFUSALS)

        wait_until(train_all, deadline_s=PATIENCE_S, what="all to train with all replicas", every_s=0.5)
        for namespace in REFUSALS:
            body = get(api_server, namespace)
            assert condition(body, "PodsReady").get("reason") != "PodsRefused"
            assert body["status"]["restartCount"] == 0
            api_server.kubectl("-n", namespace, "delete", "hpjob", "llm", "--timeout=240s")
