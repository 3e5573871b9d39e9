"""Installing, upgrading and uninstalling on a real API server, and what the account may do there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until
from elastipod_operator.api import crd

CHART = Path(__file__).resolve().parents[2] / "charts" / "elastipod"
JOBS = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
OPERATOR = "system:serviceaccount:aws-hyperpod:elastipod"


def may(
    cluster: Cluster, who: str, verb: str, resource: str, namespace: str = "default", subresource: str = ""
) -> bool:
    options = [f"--as={who}", f"--subresource={subresource}"]
    return cluster.kubectl("-n", namespace, "auth", "can-i", verb, resource, *options, check=False).strip() == "yes"


@pytest.fixture(scope="module", autouse=True)
def roles_in_force(installed: Cluster) -> None:
    """The API server learns of new roles through a watch of its own."""
    wait_until(
        lambda: may(installed, OPERATOR, "watch", JOBS), deadline_s=30, what="the roles to be in force", every_s=0.1
    )


@pytest.mark.parametrize(
    ("verb", "resource", "subresource", "namespace", "allowed"),
    [
        ("watch", JOBS, "", "default", True),
        ("patch", JOBS, "status", "default", True),
        ("patch", JOBS, "scale", "default", False),
        ("create", JOBS, "", "default", False),
        ("create", "pods", "", "default", True),
        ("create", "pods", "exec", "default", False),
        ("create", "events", "", "default", True),
        ("patch", "pods", "", "default", False),
        ("list", "nodes", "", "default", True),
        ("list", "priorityclasses.scheduling.k8s.io", "", "default", True),
        ("create", "priorityclasses.scheduling.k8s.io", "", "default", False),
        ("patch", "nodes", "", "default", False),
        ("create", "secrets", "", "default", True),
        ("get", "secrets", "", "default", False),
        ("list", "secrets", "", "default", False),
        ("watch", "secrets", "", "default", False),
        ("delete", "secrets", "", "default", False),
        ("get", "secrets", "", "aws-hyperpod", False),
        ("update", "leases.coordination.k8s.io/elastipod-operator", "", "aws-hyperpod", True),
        ("update", "leases.coordination.k8s.io/another", "", "aws-hyperpod", False),
        ("create", "leases.coordination.k8s.io", "", "default", False),
    ],
)
def test_the_operator_may(
    installed: Cluster, verb: str, resource: str, subresource: str, namespace: str, allowed: bool
):
    assert may(installed, OPERATOR, verb, resource, namespace, subresource) is allowed


def test_restricted_namespaces_admit_the_pod(installed: Cluster):
    def has_pod() -> bool:
        return installed.kubectl("-n", "aws-hyperpod", "get", "pods", "-o", "name") != ""

    wait_until(has_pod, deadline_s=30, what="the operator's pod to be created", every_s=0.1)


def test_users_get_their_rights_through_the_clusters_roles(installed: Cluster):
    installed.kubectl("create", "rolebinding", "ann", "--clusterrole=edit", "--user=ann", "-n", "default")
    installed.kubectl("create", "rolebinding", "bob", "--clusterrole=view", "--user=bob", "-n", "default")
    wait_until(
        lambda: may(installed, "ann", "create", JOBS) and may(installed, "bob", "watch", JOBS),
        deadline_s=30,
        what="the roles to be aggregated",
        every_s=0.2,
    )
    assert may(installed, "ann", "patch", JOBS, subresource="scale")
    assert not may(installed, "ann", "patch", JOBS, subresource="status")
    assert not may(installed, "bob", "create", JOBS)


def install_key(cluster: Cluster) -> str:
    """Give the key as it is stored."""
    text = cluster.kubectl("-n", "aws-hyperpod", "get", "secret", "elastipod-install-key", "-o", "json")
    key: str = json.loads(text)["data"]["install-key"]
    return key


def test_upgrade_and_uninstall_keep_jobs(cluster: Cluster, installed: Cluster):
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
