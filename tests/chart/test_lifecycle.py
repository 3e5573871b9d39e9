"""A release from its installation to its return under another name, while a job trains that must not notice.

A control plane of its own, nodes and agents that the test plays, and an operator that runs as the release's pods would: with the
environment of the Deployment, the key of its Secret and a token of its service account. So it has the rights of the roles alone.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.compat_lives import last_condition, operator
from tests.api.compat_nodes import PlayedNodes
from tests.api.jobs import apply, get, job
from tests.chart.rendered import CHART
from tests.free_ports import free_port
from tests.objects import is_served, list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until
from elastipod_operator.agents.authentication import NO_CREDENTIALS
from elastipod_operator.api import crd
from elastipod_operator.kube.job_keys import JobKeys, key_secret_of

NAMESPACE, JOBS = "aws-hyperpod", "default"
# What the operations guide says about a release under another name.
KEEPS_ALL = ("--take-ownership", "--set", "authentication.existingSecret=elastipod-install-key")


@dataclass
class Site:
    """The cluster with the job, and what is known of the release that runs."""

    cluster: Cluster
    nodes: PlayedNodes
    folder: Path
    logs: list[Path] = field(default_factory=list)

    def helm(self, *arguments: str) -> None:
        self.cluster.helm(*arguments, "--namespace", NAMESPACE)

    def read(self, kind: str, name: str, namespace: str = NAMESPACE) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cluster.kubectl("-n", namespace, "get", kind, name, "-o", "json"))
        return found

    def install_keys(self, name: str) -> tuple[bytes, ...]:
        """Give the key that the operator's pods would mount."""
        volumes = self.read("deployment", name)["spec"]["template"]["spec"]["volumes"]
        secret = next(one["secret"]["secretName"] for one in volumes if one["name"] == "install-key")
        return (base64.b64decode(self.read("secret", secret)["data"]["install-key"]),)

    @contextmanager
    def operator_of(self, name: str) -> Iterator[None]:
        """Run the operator as a pod of this release would, and wait until it leads."""
        pod = self.read("deployment", name)["spec"]["template"]["spec"]
        folder = self.folder / f"{len(self.logs)}-{name}"
        folder.mkdir()
        key = folder / "key"
        key.write_bytes(b"\n".join(self.install_keys(name)))
        environment = {one["name"]: one["value"] for one in pod["containers"][0]["env"] if "value" in one}
        environment |= {"POD_NAME": f"{name}-0", "POD_NAMESPACE": NAMESPACE, "METRICS_PORT": "0"}
        environment |= {"ELASTIPOD_INSTALL_KEY_FILE": str(key)}
        environment |= {"KUBECONFIG": str(self._account(pod["serviceAccountName"], folder / "kubeconfig"))}
        if "WEBHOOK_PORT" in environment:
            environment["WEBHOOK_PORT"] = str(free_port())
        with operator(self.cluster, folder, (), environment) as log:
            self.logs.append(log)
            yield

    def _account(self, account: str, path: Path) -> Path:
        """Write a kubeconfig with which a program has the rights of a service account."""
        token = self.cluster.kubectl("-n", NAMESPACE, "create", "token", account, "--duration=1h").strip()
        config = yaml.safe_load(self.cluster.kubeconfig.read_text(encoding="utf-8"))
        config["users"][0]["user"] = {"token": token}
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path

    def responds(self, ceiling: int) -> None:
        """Wait until the operator warns of a ceiling that has no effect: it reads, decides and writes, and disturbs nobody."""
        patch = json.dumps({"spec": {"replicas": ceiling}})
        self.cluster.kubectl("-n", JOBS, "patch", "hpjob", "llm", "--type=merge", f"--patch={patch}")
        wait_until(
            lambda: f"spec.replicas is {ceiling} " in json.dumps(get(self.cluster, JOBS)["status"]["conditions"]),
            deadline_s=PATIENCE_S,
            what=f"the operator's answer to a ceiling of {ceiling}",
        )

    def pods(self) -> dict[str, tuple[str, int]]:
        """Give the job's pods: UID, and how often its workers were started (a pod that no node has seen yet: never)."""
        items = list_objects(self.cluster, "pods", JOBS, labelSelector="HPJob%3Dllm")
        names = {one["metadata"]["name"]: one["metadata"]["uid"] for one in items}
        return {name: (uid, len(self.nodes.starts.get(name, []))) for name, uid in names.items()}

    def knows_the_keys(self, name: str) -> bool:
        """Whether a release can call the agents of the job's pods."""
        keys, body = JobKeys(self.install_keys(name)), get(self.cluster, JOBS)
        items = list_objects(self.cluster, "pods", JOBS, labelSelector="HPJob%3Dllm")
        secrets = [(one["metadata"]["name"], key_secret_of(one, "trainer")) for one in items]
        uid = body["metadata"]["uid"]
        return all(keys.credentials("llm", uid, pod, secret) != NO_CREDENTIALS for pod, secret in secrets)

    def exists(self, kind: str, name: str) -> bool:
        return self.cluster.kubectl("get", kind, name, "-o", "name", "--ignore-not-found") != ""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        cluster = stack.enter_context(Cluster.up("chart-lifecycle", nodes=0, run_dir=tmp_path / "cluster"))
        nodes = stack.enter_context(PlayedNodes(cluster.kubeconfig, {"ml.c5.4xlarge": 2}, {}))
        cluster.kubectl("create", "namespace", NAMESPACE)
        yield Site(cluster, nodes, tmp_path)


@pytest.mark.slow
def test_a_job_trains_through_the_whole_life_of_a_release(site: Site) -> None:
    cluster, name = site.cluster, f"{NAMESPACE}-elastipod"
    site.helm("install", "elastipod", str(CHART))
    wait_until(
        lambda: is_served(cluster, "hyperpodpytorchjobs"), deadline_s=PATIENCE_S, what="the API server to serve jobs"
    )
    with site.operator_of("elastipod"):
        apply(cluster, JOBS, job(elasticPolicy={"minReplicas": 1, "maxReplicas": 2}))
        wait_until(
            lambda: len(site.pods()) == 2 and last_condition(get(cluster, JOBS)).get("reason") == "Training",
            deadline_s=PATIENCE_S,
            what="the job to train",
        )
        before = site.pods()
        assert [started for _, started in before.values()] == [1, 1]
        site.responds(11)

    changes = "webhook.enabled=true,admissionPolicy.enabled=true,watchNamespaces={default},logLevel=debug"
    site.helm("upgrade", "elastipod", str(CHART), "--set", changes)
    with site.operator_of("elastipod"):
        site.responds(12)

        def has_authority() -> bool:
            (webhook,) = site.read("validatingwebhookconfiguration", name)["webhooks"]
            return "caBundle" in webhook["clientConfig"]

        wait_until(has_authority, deadline_s=PATIENCE_S, what="the operator to write the webhook's authority")
        site.helm("upgrade", "elastipod", str(CHART), "--set", f"{changes},replicas=1")
        assert has_authority(), "an upgrade keeps it"
    assert site.pods() == before

    site.helm("rollback", "elastipod", "1")
    assert not site.exists("validatingwebhookconfiguration", name)
    assert not site.exists("validatingadmissionpolicy", f"{name}-jobs")
    with site.operator_of("elastipod"):
        site.responds(13)
    assert site.pods() == before

    site.helm("uninstall", "elastipod")
    assert site.exists("crd", crd.CRD_NAME)
    assert not site.exists("clusterrole", name)
    assert site.pods() == before

    site.helm("install", "trainer", str(CHART), *KEEPS_ALL)
    assert site.knows_the_keys("trainer-elastipod")
    with site.operator_of("trainer-elastipod"):
        site.responds(14)
        assert site.pods() == before
        site.nodes.complete({"llm"})
        wait_until(
            lambda: last_condition(get(cluster, JOBS)).get("type") == "Completed",
            deadline_s=PATIENCE_S,
            what="the job to complete",
        )
    forbidden = [line for log in site.logs for line in log.read_text().splitlines() if "forbidden" in line.lower()]
    assert forbidden == []
