"""What a user sees of a job and does to it with kubectl."""

from __future__ import annotations

import json

import pytest
from tests.api.jobs import apply, get, job, refusal

from elastipod_local.cluster import Cluster
from elastipod_operator.api import generate, pod_schema

ELASTIC = {"minReplicas": 2, "maxReplicas": 8}


def report(cluster: Cluster, namespace: str, name: str, status: dict[str, object]) -> None:
    """Write a status as the operator does, through the subresource."""
    text = json.dumps({"status": status})
    cluster.kubectl("-n", namespace, "patch", "hpjob", name, "--subresource=status", "--type=merge", "-p", text)


def table(cluster: Cluster, namespace: str, *options: str) -> list[list[str]]:
    lines = cluster.kubectl("-n", namespace, "get", "hpjob", *options).splitlines()
    return [line.split() for line in lines]


def test_columns(api_server: Cluster, namespace: str) -> None:
    body = job(elasticPolicy=ELASTIC)
    body["metadata"] |= {
        "labels": {"kueue.x-k8s.io/queue-name": "team-a"},
        "annotations": {
            "elastipod.io/size": "4/8/16",
            "elastipod.io/step": "40/100",
            "elastipod.io/eta": "2026-03-01T12:00:00Z",
            "elastipod.io/checkpoint": "30",
        },
    }
    apply(api_server, namespace, body)
    conditions = [{"type": name, "status": "True", "reason": f"{name}Now"} for name in ("Created", "Running")]
    report(api_server, namespace, "llm", {"conditions": conditions, "restartCount": 3})
    header, row = table(api_server, namespace)
    assert header == ["NAME", "STATE", "SIZE", "RESTARTS", "QUEUE", "AGE"]
    assert row[:5] == ["llm", "Running", "4/8/16", "3", "team-a"]
    header, row = table(api_server, namespace, "-o", "wide")
    assert header[-4:] == ["REASON", "STEP", "ETA", "CHECKPOINT"]
    assert row[-4:] == ["RunningNow", "40/100", "2026-03-01T12:00:00Z", "30"]


@pytest.mark.parametrize("kind", ["hpjob", "hyperpodjob", "hyperpodpytorchjob", "hyperpodpytorchjobs"])
def test_names_of_the_kind(api_server: Cluster, namespace: str, kind: str) -> None:
    apply(api_server, namespace, job())
    assert api_server.kubectl("-n", namespace, "get", kind, "-o", "name").strip().endswith("/llm")


def test_scale_sets_the_ceiling(api_server: Cluster, namespace: str) -> None:
    apply(api_server, namespace, job(elasticPolicy=ELASTIC))
    api_server.kubectl("-n", namespace, "scale", "hyperpodjob/llm", "--replicas=4")
    assert get(api_server, namespace)["spec"]["replicas"] == 4
    patch = '[{"op": "replace", "path": "/spec/replicas", "value": 6}]'
    api_server.kubectl("-n", namespace, "patch", "hpjob", "llm", "--type=json", "-p", patch)
    assert get(api_server, namespace)["spec"]["replicas"] == 6


def test_the_scale_subresource_tells_how_many_train(api_server: Cluster, namespace: str) -> None:
    """What HPA reads; the status is written as the operator writes it."""
    apply(api_server, namespace, job(elasticPolicy=ELASTIC))
    status: dict[str, object] = {
        "elasticScalingStatus": {"targetReplicas": {"pods": 4, "Running": 3}},
        "elasticWorkloadRef": {"selector": "HPJob=llm"},
    }
    report(api_server, namespace, "llm", status)
    path = f"/apis/sagemaker.amazonaws.com/v1/namespaces/{namespace}/hyperpodpytorchjobs/llm/scale"
    scale = json.loads(api_server.kubectl("get", "--raw", path))
    assert scale["status"] == {"replicas": 3, "selector": "HPJob=llm"}


def test_scale_below_the_minimum_is_refused(api_server: Cluster, namespace: str) -> None:
    apply(api_server, namespace, job(elasticPolicy=ELASTIC))
    assert "the smallest allowed size is 2" in refusal(api_server, namespace, job(elasticPolicy=ELASTIC, replicas=1))
    said = api_server.kubectl("-n", namespace, "scale", "hpjob/llm", "--replicas=1", check=False)
    assert "scaled" not in said
    assert get(api_server, namespace)["spec"]["replicas"] == 0


def test_the_ceiling_survives_another_apply(api_server: Cluster, namespace: str) -> None:
    apply(api_server, namespace, job(elasticPolicy=ELASTIC))
    api_server.kubectl("-n", namespace, "scale", "hpjob/llm", "--replicas=4")
    apply(api_server, namespace, job(elasticPolicy=ELASTIC))
    assert get(api_server, namespace)["spec"]["replicas"] == 4


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("hpjob.spec.elasticPolicy.minReplicas", "Minimum number of replicas that train."),
        ("hpjob.spec.replicaSpecs.template.spec.containers.image", "FIELD: image <string>"),
        ("hpjob.status.masterPort", "Port of global rank 0, as a string."),
    ],
)
def test_explain(api_server: Cluster, path: str, text: str) -> None:
    assert text in api_server.kubectl("explain", path)


def test_unknown_fields_of_status_are_pruned(api_server: Cluster, namespace: str) -> None:
    apply(api_server, namespace, job())
    report(api_server, namespace, "llm", {"restartCount": 1, "goodput": 0.9})
    assert get(api_server, namespace)["status"] == {"restartCount": 1}


def test_status_is_not_written_with_the_spec(api_server: Cluster, namespace: str) -> None:
    apply(api_server, namespace, {**job(), "status": {"restartCount": 7}})
    assert "status" not in get(api_server, namespace)


def test_the_pod_schema_is_the_servers(api_server: Cluster) -> None:
    """The committed schema is what this Kubernetes describes; `generate --pod-schema-from` refreshes it."""
    served = json.loads(api_server.kubectl("get", "--raw", pod_schema.OPENAPI_PATH))
    assert pod_schema.extract(served) == pod_schema.load()
    assert generate.stale(generate.checkout()) == []
