"""The chart's NetworkPolicies, enforced by a real engine on real nodes: who may connect does, and nobody else."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import OPERATOR_NAMESPACE, ROOT
from tests.e2e.job_run import AGENT_PORT, JobRun
from tests.e2e.network_policies import enforced
from tests.long_runs import LongRun
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster

METRICS_PORT = 8081
MAY_READ_METRICS = "monitoring"
NAMESPACES = ("default", "elsewhere", MAY_READ_METRICS)
POLICIES = {
    "agents": {"enabled": True, "namespaces": ["default"]},
    "operator": {
        "enabled": True,
        "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MAY_READ_METRICS}}}],
    },
}
CHART = ("upgrade", "elastipod", str(ROOT / "charts" / "elastipod"), "--reuse-values", "-n", OPERATOR_NAMESPACE)
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3); print('reached')"


def stranger(namespace: str) -> dict[str, Any]:
    """Give a pod that is of no job, on a node without pods of jobs: pods of one node talk past the engine here."""
    away = {
        "labelSelector": {"matchExpressions": [{"key": "elastipod.io/job-uid", "operator": "Exists"}]},
        "topologyKey": "kubernetes.io/hostname",
        "namespaceSelector": {},
    }
    container = {"name": "c", "image": "docker.io/elastipod/train:dev", "command": ["sleep", "3600"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger", "namespace": namespace},
        "spec": {
            "containers": [{**container, "imagePullPolicy": "IfNotPresent"}],
            "terminationGracePeriodSeconds": 0,
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [away]}},
        },
    }


class Strangers:
    """A pod in each of some namespaces."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def reach(self, namespace: str, address: str, port: int) -> bool:
        """Whether the pod of a namespace can connect."""
        command = ("python3", "-c", CONNECT, address, str(port))
        said = self._cluster.kubectl("-n", namespace, "exec", "stranger", "--", *command, check=False)
        return said == "reached\n"

    def node(self, namespace: str) -> str:
        (pod,) = list_objects(self._cluster, "pods", namespace, fieldSelector="metadata.name%3Dstranger")
        return str(pod["spec"]["nodeName"])


@pytest.fixture
def strangers(cluster: Cluster, job: JobRun) -> Iterator[Strangers]:
    """Beside a job that trains on two nodes, whose pods the strangers keep away from."""
    quick = {"minStableSeconds": 0, "payback": "Off"}
    train = ("--steps=3000", "--epochs=3", "--min-step-time=0.2", "--checkpoint-every=1000")
    job.apply(*train, script="train.py", minimum=1, maximum=2, step=1, start=2, elastipod=quick)
    job.until_training(2, beyond_step=3)
    for namespace in NAMESPACES[1:]:
        cluster.kubectl("create", "namespace", namespace)
    try:
        for namespace in NAMESPACES:
            cluster.kubectl("apply", "-f", "-", input=json.dumps(stranger(namespace)))
        for namespace in NAMESPACES:
            wait = ("wait", "--for=condition=Ready", "pod/stranger", f"--timeout={PATIENCE_S:.0f}s")
            cluster.kubectl("-n", namespace, *wait)
        yield Strangers(cluster)
    finally:
        cluster.kubectl("delete", "pod", "stranger", "--ignore-not-found")
        for namespace in NAMESPACES[1:]:
            cluster.kubectl("delete", "namespace", namespace, "--ignore-not-found")


@pytest.fixture
def policies(cluster: Cluster) -> Iterator[None]:
    cluster.helm(*CHART, "--set-json", f"networkPolicy={json.dumps(POLICIES)}", "--wait", "--timeout", "180s")
    yield
    off = {name: {"enabled": False} for name in POLICIES}
    cluster.helm(*CHART, "--set-json", f"networkPolicy={json.dumps(off)}", "--wait", "--timeout", "180s")


def machine_reaches(address: str, port: int) -> bool:
    """Whether somebody outside the cluster can connect."""
    try:
        socket.create_connection((address, port), timeout=3).close()
    except OSError:
        return False
    return True


@pytest.mark.timeout(1200)
@pytest.mark.long("network-policies")
def test_who_may_connect_does_and_nobody_else(
    job: JobRun, cluster: Cluster, strangers: Strangers, policies: None, tmp_path: Path, long_run: LongRun
) -> None:
    agent = str(job.running_pods()[0]["status"]["podIP"])
    operators = [
        (pod["status"]["podIP"], pod["spec"]["nodeName"]) for pod in list_objects(cluster, "pods", OPERATOR_NAMESPACE)
    ]

    def reached() -> dict[str, bool]:
        found = {"agent from outside": machine_reaches(agent, AGENT_PORT)}
        for one in NAMESPACES:
            operator = next(address for address, node in operators if node != strangers.node(one))
            found[f"agent from {one}"] = strangers.reach(one, agent, AGENT_PORT)
            found[f"operator from {one}"] = strangers.reach(one, operator, METRICS_PORT)
        return found

    def step() -> int:
        """As the operator tells it: nobody else may ask the agents."""
        return int(job.body()["metadata"]["annotations"].get("elastipod.io/step", "0").split("/")[0])

    everything = reached()
    assert set(everything.values()) == {True}, "without an engine policies mean nothing"

    def trains_on(size: int) -> None:
        job.until(f"{size} replicas", lambda: job.size() == size)
        before = step()
        job.until(f"steps with {size} replicas", lambda: step() > before + 3)

    with enforced(cluster, tmp_path):
        allowed = dict.fromkeys(everything, False) | {f"operator from {MAY_READ_METRICS}": True}
        job.until("the policies to be enforced", lambda: reached() == allowed)
        trains_on(2)
        job.be_quick()
        job.scale(1)
        trains_on(1)
        job.scale(2)
        trains_on(2)
        assert reached() == allowed
    assert [entry["kind"] for entry in job.history()] == ["start", "resize", "resize"], job.story()
    job.until("everything to be reached again", lambda: set(reached().values()) == {True})
    long_run.count(connections_refused=list(allowed.values()).count(False), connections_allowed=1, resizes=2)
