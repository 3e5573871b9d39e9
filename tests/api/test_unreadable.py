"""Objects that another CRD let through: each gets a condition, can be deleted, and touches no other job.

A control plane of its own, with a CRD that lets everything through, as a version from before our rules may have done.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.compat_lives import operator
from tests.api.conftest import CHECKOUT
from tests.api.jobs import job
from tests.objects import is_served, list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until

# Texts that begin the reason: explain() and the reader of templates name the field.
BROKEN: dict[str, tuple[Any, str]] = {
    "text": ("text", 'spec is "text"'),
    "no-specs": ({}, "spec.replicaSpecs is missing"),
    "number": ({"replicaSpecs": 7}, "spec.replicaSpecs is 7"),
    "no-pod": ({"replicaSpecs": [{"name": "w", "template": {"spec": 7}}]}, "the spec cannot be read"),
    "no-metadata": (
        {"replicaSpecs": [{"name": "w", "replicas": 1, "template": {"metadata": 7, "spec": {"containers": [{"name": "t"}]}}}]},
        "spec.replicaSpecs[w].template is not a valid pod template",
    ),
    "no-variables": (
        {"replicaSpecs": [{"name": "w", "replicas": 1, "template": {"spec": {"containers": [{"name": "t", "env": 7}]}}}]},
        "the spec cannot be read",
    ),
}  # fmt: skip
GARBAGE = {"elastipod.io/state": "z:###", "elastipod.io/history": "{", "elastipod.io/applied": "x"}


@pytest.fixture(scope="module")
def lax(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane whose CRD takes anything."""
    crd = next(iter(yaml.safe_load_all((CHECKOUT / "crds/hyperpodpytorchjobs.yaml").read_text(encoding="utf-8"))))
    for version in crd["spec"]["versions"]:
        version["subresources"] = {"status": {}}  # that of scale would look into the spec
        version["schema"] = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    with Cluster.up("api-lax", nodes=0, run_dir=tmp_path_factory.mktemp("lax") / "cluster") as cluster:
        cluster.kubectl("apply", "-f", "-", input=json.dumps(crd))
        wait_until(
            lambda: is_served(cluster, "hyperpodpytorchjobs"),
            deadline_s=PATIENCE_S,
            what="the API server to serve jobs",
            every_s=0.1,
        )
        yield cluster


def jobs(cluster: Cluster) -> dict[str, dict[str, Any]]:
    listed = list_objects(cluster, "hyperpodpytorchjobs", "default")
    return {one["metadata"]["name"]: one for one in listed}


def state(body: dict[str, Any]) -> dict[str, Any]:
    conditions = (body.get("status") or {}).get("conditions") or [{}]
    last: dict[str, Any] = conditions[-1]
    return last


@pytest.mark.slow
def test_each_is_told_of_and_touches_no_other(lax: Cluster, tmp_path: Path) -> None:
    bodies = [{**job(name), "spec": spec} for name, (spec, _) in BROKEN.items()]
    good = job("good")
    scribbled = job("scribbled")
    scribbled["metadata"]["annotations"] = GARBAGE
    listed = {"apiVersion": "v1", "kind": "List", "items": [*bodies, good, scribbled]}
    lax.kubectl("-n", "default", "create", "--validate=false", "-f", "-", input=json.dumps(listed))
    with operator(lax, tmp_path, more={"ELASTIPOD_TAKE_OVER": "true"}) as log:  # it takes this CRD for a foreign one

        def are_told_of() -> bool:
            found = jobs(lax)
            return all(state(found[name]).get("reason") == "InvalidSpec" for name in BROKEN) and all(
                state(found[name]).get("type") == "Created" for name in ("good", "scribbled")
            )

        wait_until(are_told_of, deadline_s=PATIENCE_S, what="conditions of all jobs", every_s=0.2)
        said = {name: state(body).get("message", "") for name, body in jobs(lax).items()}
        assert [name for name, (_, words) in BROKEN.items() if words not in said[name]] == []

        def pods() -> list[dict[str, Any]]:
            return list_objects(lax, "pods", "default")

        wait_until(lambda: len(pods()) >= 4, deadline_s=PATIENCE_S, what="four pods", every_s=0.2)
        assert {p["metadata"]["labels"]["HPJob"] for p in pods()} == {"good", "scribbled"}
        assert len(pods()) == 4
        lax.kubectl("-n", "default", "delete", "hpjob", "--all", "--timeout=240s")
        assert jobs(lax) == {}
        text = log.read_text(encoding="utf-8")
    assert "a decision failed" not in text
    assert "Traceback" not in text
