"""Manifests in the style of the field's documents and generators apply as they are, twice, and are read by the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.jobs import apply, get, job

from elastipod_local.cluster import Cluster
from elastipod_operator.api import HyperPodPyTorchJob, JobSpec

MANIFESTS = sorted((Path(__file__).parent / "manifests").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def specs_by_name(bodies: list[dict[str, Any]]) -> dict[str, JobSpec]:
    return {body["metadata"]["name"]: HyperPodPyTorchJob.model_validate(body).spec for body in bodies}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_it_applies_twice_and_is_read(api_server: Cluster, namespace: str, path: Path) -> None:
    first = api_server.kubectl("-n", namespace, "apply", "--validate=strict", "-f", str(path)).splitlines()
    again = api_server.kubectl("-n", namespace, "apply", "--validate=strict", "-f", str(path)).splitlines()
    assert [line.rsplit(" ", 1)[1] for line in first] == ["created"] * len(documents(path))
    assert [line.rsplit(" ", 1)[1] for line in again] == ["unchanged"] * len(documents(path))
    stored = json.loads(api_server.kubectl("-n", namespace, "get", "hpjob", "-o", "json"))["items"]
    assert specs_by_name(stored) == specs_by_name(documents(path))


def test_blanks_may_be_posted_as_null(api_server: Cluster, namespace: str) -> None:
    """`kubectl apply` leaves nulls out, but Helm and Python clients post them."""
    (body,) = documents(Path(__file__).parent / "manifests" / "recipe-elastic.yaml")
    body["spec"]["replicaSpecs"][0]["template"]["spec"] |= {"tolerations": None, "dnsPolicy": None, "affinity": None}
    api_server.kubectl("-n", namespace, "create", "--validate=strict", "-f", "-", input=json.dumps(body))
    stored = get(api_server, namespace, body["metadata"]["name"])["spec"]
    assert stored["elasticPolicy"]["replicaIncrementStep"] is None
    assert stored["elasticPolicy"]["faultyScaleDownTimeoutInSeconds"] == 30


def test_defaults_are_written_into_the_object(api_server: Cluster, namespace: str) -> None:
    apply(api_server, namespace, job(elasticPolicy={}, runPolicy={"restartPolicy": {}}))
    spec = get(api_server, namespace)["spec"]
    assert (spec["nprocPerNode"], spec["replicas"]) == ("auto", 0)
    assert spec["elasticPolicy"] == {
        "scalingTimeoutInSeconds": 60,
        "gracefulShutdownTimeoutInSeconds": 600,
        "faultyScaleDownTimeoutInSeconds": 30,
    }
    assert spec["runPolicy"] == {
        "cleanPodPolicy": "All",
        "suspend": False,
        "restartPolicy": {
            "evalPeriodSeconds": 3600,
            "maxNumRepeatOffendersToAvoid": 0,
            "scaleUpSnoozeTimeInSeconds": 0,
        },
    }


def test_metadata_of_templates_is_kept(api_server: Cluster, namespace: str) -> None:
    wished = {"name": "x", "namespace": "y", "labels": {"a": "b"}, "annotations": {"c": "d"}}
    body = job(
        replica_specs=[{"name": "pods", "template": {"metadata": wished, "spec": {"containers": [{"name": "a"}]}}}]
    )
    apply(api_server, namespace, body)
    assert get(api_server, namespace)["spec"]["replicaSpecs"][0]["template"]["metadata"] == wished
