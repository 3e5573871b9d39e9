"""Specs, and the Workloads that are requested for them."""

from __future__ import annotations

from typing import Any

from elastipod_operator.core.actions import CreateWorkload

Body = dict[str, Any]
POD = {
    "containers": [
        {"name": "train", "image": "train:1", "command": ["hyperpodrun"], "env": [{"name": "A", "value": "1"}] * 2,
         "ports": [{"containerPort": 8080}] * 2, "volumeMounts": [{"name": "v", "mountPath": "/v"}],
         "resources": {"limits": {"nvidia.com/gpu": "8"}, "requests": {"cpu": "4"}}},
        {"image": "nameless:1"},
    ],
    "initContainers": [{"name": "side", "image": "s:1", "restartPolicy": "Always", "resources": {"requests": {"cpu": "1"}}}],
    "nodeSelector": {"pool": "a"},
    "affinity": {"nodeAffinity": {"x": 1}},
    "tolerations": [{"operator": "Exists"}],
    "runtimeClassName": "nvidia",
    "overhead": {"cpu": "1"},
    "priorityClassName": "high",
    "serviceAccountName": "sa",
    "volumes": [{"name": "v", "secret": {"secretName": "s"}}],
}  # fmt: skip


def two_specs(base: Body | None = None, elastic: Body | None = None) -> Body:
    return {
        "replicaSpecs": [
            {"name": "base", "replicas": 2, "template": base or {"spec": POD}},
            {"name": "elastic", "replicas": 0, "maxReplicas": 4, "template": elastic or {"spec": POD}},
        ]
    }


def ask(number: int = 0, queue: str = "gpus", **counts: int) -> CreateWorkload:
    return CreateWorkload(number, tuple(counts.items()), queue)
