"""Installing, upgrading and uninstalling on a real API server, and what the account may do there."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.errors import CommandError
from elastipod_local.host import wait_until
from elastipod_operator.api import crd

CHART = Path(__file__).resolve().parents[2] / "charts" / "elastipod"
JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
OPERATOR = "system:serviceaccount:aws-hyperpod:elastipod"


# What an account asks to do, and whether it may: verb, resource or one object of it, subresource, namespace.
Act = tuple[str, str, str, str]
RIGHTS: dict[Act, bool] = {
    ("watch", JOBS, "", "default"): True,
    ("patch", JOBS, "status", "default"): True,
    ("patch", JOBS, "scale", "default"): False,
    ("create", JOBS, "", "default"): False,
    ("create", "pods", "", "default"): True,
    ("create", "pods", "exec", "default"): False,
    ("create", "events", "", "default"): True,
    ("patch", "pods", "", "default"): False,
    ("list", "nodes", "", "default"): True,
    ("list", "priorityclasses.scheduling.k8s.io", "", "default"): True,
    ("create", "priorityclasses.scheduling.k8s.io", "", "default"): False,
    ("patch", "nodes", "", "default"): False,
    ("create", "secrets", "", "default"): True,
    ("get", "secrets", "", "default"): False,
    ("list", "secrets", "", "default"): False,
    ("watch", "secrets", "", "default"): False,
    ("delete", "secrets", "", "default"): False,
    ("get", "secrets", "", "aws-hyperpod"): False,
    ("update", "leases.coordination.k8s.io/elastipod-operator", "", "aws-hyperpod"): True,
    ("update", "leases.coordination.k8s.io/another", "", "aws-hyperpod"): False,
    ("create", "leases.coordination.k8s.io", "", "default"): False,
}


def allowed(cluster: Cluster, who: str, acts: Iterable[Act]) -> dict[Act, bool]:
    """Ask the API server what an account may do, all in one call."""
    asked = list(acts)
    items = [_review(*act) for act in asked]
    answers = cluster.kubectl(
        *("create", "--validate=false", f"--as={who}", "-f", "-", "-o", r"jsonpath={.status.allowed}{'\n'}"),
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": items}),
    )
    return dict(zip(asked, (answer == "true" for answer in answers.split()), strict=True))


def _review(verb: str, resource: str, subresource: str, namespace: str) -> dict[str, Any]:
    kind, _, name = resource.partition("/")
    plural, _, group = kind.partition(".")
    attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource, "name": name}
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {**attributes, "namespace": namespace}},
    }


def test_the_operator_may_do_what_it_needs_and_no_more(installed: Cluster) -> None:
    """The API server learns of new roles through watches of its own, so rights come one after the other."""
    granted = [act for act, is_granted in RIGHTS.items() if is_granted]
    wait_until(
        lambda: all(allowed(installed, OPERATOR, granted).values()),
        deadline_s=PATIENCE_S,
        what="the roles to be in force",
    )
    assert allowed(installed, OPERATOR, RIGHTS) == RIGHTS


@pytest.mark.slow
def test_pods_of_a_job_need_the_right_on_its_finalizers(installed: Cluster) -> None:
    """The API server asks for it when a pod is created that its owner waits for."""
    rules = json.loads(installed.kubectl("get", "clusterrole", "aws-hyperpod-elastipod", "-o", "json"))["rules"]
    fewer = [rule for rule in rules if "hyperpodpytorchjobs/finalizers" not in rule["resources"]]
    assert len(fewer) == len(rules) - 1
    role = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "fewer"}}
    installed.kubectl("create", "-f", "-", input=json.dumps({**role, "rules": fewer}))
    installed.kubectl("create", "clusterrolebinding", "fewer", "--clusterrole=fewer", "--user=fewer")
    wait_until(
        lambda: installed.kubectl("auth", "can-i", "create", "pods", "--as=fewer", check=False) == "yes\n",
        deadline_s=PATIENCE_S,
        what="the role to be in force",
    )
    owner = {"apiVersion": "sagemaker.amazonaws.com/v1", "kind": "HyperPodPyTorchJob", "name": "llm", "uid": "u-1"}
    owners = [{**owner, "controller": True, "blockOwnerDeletion": True}]
    pod = {"containers": [{"name": "trainer", "image": "train:1"}]}
    meta = {"name": "llm-0", "namespace": "default", "ownerReferences": owners}
    body = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod})
    create = ("create", "--dry-run=server", "-f", "-")
    wait_until(
        lambda: "llm-0 created" in installed.kubectl(*create, f"--as={OPERATOR}", input=body, check=False),
        deadline_s=PATIENCE_S,
        what="the API server to know the kind, for which it looks every half minute",
        every_s=1,
    )
    with pytest.raises(CommandError, match="you can't set finalizers on"):
        installed.kubectl(*create, "--as=fewer", input=body)


def test_restricted_namespaces_admit_the_pod(installed: Cluster) -> None:
    def has_pod() -> bool:
        return list_objects(installed, "pods", "aws-hyperpod") != []

    wait_until(has_pod, deadline_s=PATIENCE_S, what="the operator's pod to be created", every_s=0.1)


def test_users_get_their_rights_through_the_clusters_roles(installed: Cluster) -> None:
    installed.kubectl("create", "rolebinding", "ann", "--clusterrole=edit", "--user=ann", "-n", "default")
    installed.kubectl("create", "rolebinding", "bob", "--clusterrole=view", "--user=bob", "-n", "default")
    acts = [
        (verb, JOBS, part, "default")
        for verb, part in (("create", ""), ("watch", ""), ("patch", "scale"), ("patch", "status"))
    ]

    def rights(who: str) -> list[bool]:
        return list(allowed(installed, who, acts).values())

    wait_until(
        lambda: all(rights("ann")[:3]) and rights("bob")[1], deadline_s=PATIENCE_S, what="the roles to be aggregated"
    )
    assert rights("ann") == [True, True, True, False]
    assert rights("bob") == [False, True, False, False]


def install_key(cluster: Cluster) -> str:
    """Give the key as it is stored."""
    text = cluster.kubectl("-n", "aws-hyperpod", "get", "secret", "elastipod-install-key", "-o", "json")
    key: str = json.loads(text)["data"]["install-key"]
    return key


def test_upgrade_and_uninstall_keep_jobs(cluster: Cluster, installed: Cluster) -> None:
    """Runs last: takes the release away."""
    pod = {"spec": {"containers": [{"name": "trainer", "image": "train:1"}]}}
    job = {
        "apiVersion": "sagemaker.amazonaws.com/v1",
        "kind": "HyperPodPyTorchJob",
        "metadata": {"name": "llm"},
        "spec": {"replicaSpecs": [{"name": "pods", "replicas": 1, "template": pod}]},
    }
    cluster.kubectl("-n", "default", "apply", "-f", "-", input=json.dumps(job))
    key = install_key(cluster)
    cluster.helm("upgrade", "elastipod", str(CHART), "-n", "aws-hyperpod", "--set", "logLevel=debug")
    assert install_key(cluster) == key
    text = cluster.kubectl("-n", "aws-hyperpod", "get", "deployment", "elastipod", "-o", "json")
    (container,) = json.loads(text)["spec"]["template"]["spec"]["containers"]
    assert {"name": "LOG_LEVEL", "value": "debug"} in container["env"]
    cluster.helm("uninstall", "elastipod", "-n", "aws-hyperpod")
    assert cluster.kubectl("get", "crd", crd.CRD_NAME, "-o", "name").strip().endswith(crd.CRD_NAME)
    assert cluster.kubectl("-n", "default", "get", "hpjob", "-o", "name").strip().endswith("/llm")
    assert cluster.kubectl("get", "clusterroles", "-l", "app.kubernetes.io/name=elastipod", "-o", "name") == ""
    cluster.helm("install", "elastipod", str(CHART), "-n", "aws-hyperpod")
    assert install_key(cluster) == key, "who installs again can talk to the pods that still train"
    cluster.helm("uninstall", "elastipod", "-n", "aws-hyperpod")
