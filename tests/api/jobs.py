"""Jobs for the tests of this tier, and the ways a user hands them in."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from tests.objects import get_object

from elastipod_local.cluster import Cluster
from elastipod_local.errors import CommandError

TEMPLATE = {"spec": {"containers": [{"name": "trainer", "image": "train:1"}]}}


def job(name: str = "llm", *, replica_specs: Iterable[dict[str, Any]] = (), **spec: Any) -> dict[str, Any]:
    """Give a job of two pods; keywords are fields of its spec. Each of `replica_specs` gets a template."""
    specs = list(replica_specs) or [{"name": "pods", "replicas": 2}]
    return {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": name},
        "spec": {"replicaSpecs": [{"template": TEMPLATE, **one} for one in specs], **spec},
    }


def apply(cluster: Cluster, namespace: str, body: dict[str, Any]) -> str:
    """Apply as `kubectl apply -f -` does; gives what kubectl printed, raises CommandError when it is refused."""
    return cluster.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(body))


def refusal(cluster: Cluster, namespace: str, body: dict[str, Any]) -> str:
    """Give what kubectl says about a job that must be refused."""
    with pytest.raises(CommandError) as caught:
        apply(cluster, namespace, body)
    return caught.value.output


def get(cluster: Cluster, namespace: str, name: str = "llm") -> dict[str, Any]:
    """Give a job as the API server holds it."""
    return get_object(cluster, "hyperpodpytorchjobs", name, namespace)
