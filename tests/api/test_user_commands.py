"""The users' commands with a real kubectl and a real API server; no operator runs."""

from __future__ import annotations

import json
import os

import pytest
from tests.api.jobs import apply, get, job
from tests.nonempty import every

from elastipod import cli
from elastipod_local import binaries
from elastipod_local.cluster import Cluster

ELASTIC = {"minReplicas": 1, "maxReplicas": 4}


@pytest.fixture
def options(api_server: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What every command of this test needs to find the API server."""
    folder = binaries.ensure(["kubectl"])["kubectl"].parent
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return ["--kubeconfig", str(api_server.kubeconfig), "-n", namespace]


def test_a_job_that_no_operator_has_seen(
    api_server: Cluster, namespace: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    apply(api_server, namespace, job(elasticPolicy=ELASTIC))
    assert cli.main(["why", "llm", *options]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith(f"Job {namespace}/llm was created, but no operator has looked at it since")
    assert "Not read" not in text
    assert cli.main(["timeline", "llm", *options]) == 1
    assert cli.main(["logs", "llm", "--first-failure", *options]) == 0


def test_a_job_that_does_not_exist(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["why", "nothing", *options]) == 3
    assert '"nothing" not found' in capsys.readouterr().err


def test_a_queue_without_kueue_is_missing(
    api_server: Cluster, namespace: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    queued = job()
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "gpus"}
    apply(api_server, namespace, queued)
    assert cli.main(["why", "llm", *options]) == 1
    assert "QueueMissing: LocalQueue gpus does not exist" in " ".join(capsys.readouterr().out.split())


def test_suspend_resume_and_scale(
    api_server: Cluster, namespace: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    apply(api_server, namespace, job(elasticPolicy=ELASTIC))
    assert cli.main(["suspend", "llm", *options]) == 0
    assert get(api_server, namespace)["spec"]["runPolicy"]["suspend"] is True
    assert cli.main(["resume", "llm", *options]) == 0
    assert get(api_server, namespace)["spec"]["runPolicy"]["suspend"] is False
    assert cli.main(["scale", "llm", "--replicas=3", *options]) == 0
    assert get(api_server, namespace)["spec"]["replicas"] == 3
    assert "the ceiling was none and is 3" in capsys.readouterr().out


def test_what_the_api_server_refuses_is_said(
    api_server: Cluster, namespace: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    apply(api_server, namespace, job(elasticPolicy={"minReplicas": 2, "maxReplicas": 4}))
    assert cli.main(["scale", "llm", "--replicas=1", *options]) == 3
    assert "spec.replicas" in capsys.readouterr().err


def test_the_doctor_of_a_cluster_without_operator(
    api_server: Cluster, namespace: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    apply(api_server, namespace, job())
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus"},
        "spec": {"hard": {"nvidia.com/gpu": 4}},
    }
    apply(api_server, namespace, quota)
    assert cli.main(["doctor", "-o", "json", *options]) == 1
    found = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    verdicts = {what: check["verdict"] for what, check in found.items()}
    assert verdicts == {
        "cluster": "ok", "CRD": "ok", "operator": "error", "other controllers": "ok", "agents": "ok", "Kueue": "ok",
        "ResourceQuotas": "warning",
    }  # fmt: skip
    assert "nvidia.com/gpu in" in found["ResourceQuotas"]["message"]


OPERATOR = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "elastipod", "labels": {"app.kubernetes.io/component": "operator"}},
    "spec": {
        "selector": {"matchLabels": {"app": "x"}},
        "template": {
            "metadata": {"labels": {"app": "x"}},
            "spec": {
                "serviceAccountName": "elastipod",
                "containers": [{"name": "operator", "image": "x", "command": ["elastipod", "operator"]}],
            },
        },
    },
}


def test_the_doctor_asks_for_the_rights_of_the_operators_account(
    api_server: Cluster, namespace: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    apply(api_server, namespace, OPERATOR)
    try:
        assert cli.main(["doctor", "-o", "json", *options]) == 1
        found = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    finally:
        api_server.kubectl("-n", namespace, "delete", "deployment", "elastipod")
    assert found["rights"]["verdict"] == "error"
    denied = found["rights"]["message"]
    assert denied.startswith(f"system:serviceaccount:{namespace}:elastipod must not: ")
    assert every(right in denied for right in ("list pods", "patch hyperpodpytorchjobs/status", "create secrets"))
    assert found["leader"]["verdict"] == "error"
