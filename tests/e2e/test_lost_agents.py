"""Agents that are no more, on real kubelets: a container that ends beside a sidecar, a shell that stays, a dead node."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import OPERATOR_NAMESPACE
from tests.e2e.job_run import JobRun
from tests.objects import list_objects

from elastipod_local.cluster import Cluster

# What becomes of the first agent when a file asks for it. Workers do nothing: they are no part of this.
WAITS = 'until [ -e "/data/$JOB/$ELASTIPOD_POD" ]; do sleep 0.2; done'
AGENT = "hyperpodrun --no-python sleep 1000"
ENDS_WITH_ITS_CONTAINER = f"{AGENT} & {WAITS}; exit 7"
ENDS_IN_A_SHELL = f"{AGENT} & {WAITS}; kill -9 $!; exec sleep 1000"
SIDECAR = {"name": "a-sidecar", "image": "docker.io/elastipod/train:dev", "command": ["sleep", "1000"],
           "imagePullPolicy": "IfNotPresent", "resources": {"requests": {"cpu": "10m"}}}  # fmt: skip


def folder_of(cluster: Cluster, job: JobRun) -> Path:
    """Give a folder that the job's pods see as /data/<job>."""
    claim = json.loads(cluster.kubectl("get", "pvc", "training-data", "-o", "json"))
    (root,) = cluster.shared.glob(f"*{claim['spec']['volumeName']}*")
    folder = root / job.name
    folder.mkdir(exist_ok=True)
    return folder


def begun(cluster: Cluster, name: str, command: str, replicas: int, **changes: Any) -> JobRun:
    """Apply a job of small replicas that run this command, and wait until they train."""
    job = JobRun(cluster, name)
    job.apply(
        minimum=replicas, maximum=replicas, step=1, start=replicas, command=["sh", "-c", command], cpu="100m",
        container={"env": [{"name": "JOB", "value": name}]}, pod={"terminationGracePeriodSeconds": 3}, **changes,
    )  # fmt: skip
    return job


@dataclass(frozen=True)
class Hit:
    """A job whose first agent has been asked to end. pod: the name of its pod."""

    job: JobRun
    replicas: int
    pod: str


@pytest.fixture(scope="module")
def hits(cluster: Cluster) -> Iterator[dict[str, Hit]]:
    """A job with a sidecar and one with a shell that stays, each of one and of two replicas; the first agent of each ends."""
    kinds: dict[str, tuple[str, list[dict[str, Any]]]] = {
        "sidecar": (ENDS_WITH_ITS_CONTAINER, [SIDECAR]), "shell": (ENDS_IN_A_SHELL, [])
    }  # fmt: skip
    begun_jobs = [
        (begun(cluster, f"{kind}-{replicas}", command, replicas, beside=beside), replicas)
        for kind, (command, beside) in kinds.items()
        for replicas in (1, 2)
    ]
    try:
        made: dict[str, Hit] = {}
        for job, replicas in begun_jobs:
            job.until("the replicas", partial(_has_size, job, replicas))
            (first,) = [name for pod in job.running_pods() if "-worker-0" in (name := pod["metadata"]["name"])]
            made[job.name] = Hit(job, replicas, first)
        for hit in made.values():
            (folder_of(cluster, hit.job) / hit.pod).touch()
        yield made
    finally:
        for job, _ in begun_jobs:
            job.delete(wait=False)
        for job, _ in begun_jobs:
            job.delete()


def _has_size(job: JobRun, size: int) -> bool:
    return job.size() == size


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [("sidecar", "PodFailed", "exit code 7"), ("shell", "AgentEnded", "nothing listens on its port")],
)
def test_an_agent_that_ends_while_its_pod_lives(
    hits: dict[str, Hit], kind: str, cause: str, words: str, replicas: int
) -> None:
    hit = hits[f"{kind}-{replicas}"]
    job = hit.job
    job.until("all replicas to train again", lambda: len(job.history()) == 2 and job.size() == replicas)
    entry = job.history()[-1]
    assert (entry["kind"], entry["cause"], entry["to"]) == ("recovery", cause, replicas), job.story()
    assert job.body()["status"]["restartStatus"]["restartCount"] == 1, "it ended by itself"
    job.until_event(cause, words)
    job.until(
        "its pod to go, whose other container ran on",
        lambda: hit.pod not in {pod["metadata"]["name"] for pod in job.pods()},
    )


@pytest.mark.long("power-loss")
def test_the_only_replica_on_a_node_that_loses_power(cluster: Cluster) -> None:
    """Its node being not ready decides, long before Kubernetes would drive the pod away (after five minutes)."""
    job = begun(cluster, "lone-replica", AGENT, 1)
    try:
        job.until("the replica", lambda: job.size() == 1)
        (pod,) = job.running_pods()
        node = pod["spec"]["nodeName"]
        _keep_the_operator_off(cluster, node)
        cluster.kill_node(node)
        try:
            job.until("a recovery", lambda: len(job.history()) == 2 and job.size() == 1)
            entry = job.history()[-1]
            assert (entry["kind"], entry["cause"]) == ("recovery", "NodeLost"), job.story()
            job.until_event("NodeLost", f"node {node} is not ready")
            old = next((p for p in job.pods() if p["metadata"]["name"] == pod["metadata"]["name"]), None)
            evicted = [
                c for c in (old or {}).get("status", {}).get("conditions", ()) if c["type"] == "DisruptionTarget"
            ]
            assert not evicted, "nothing waited for the eviction"
            assert job.body()["status"]["restartStatus"]["restartCount"] == 0, "no fault of the workers"
        finally:
            cluster.return_node(node)
            cluster.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=240s")
            cluster.kubectl("uncordon", node)
    finally:
        job.delete()


def _keep_the_operator_off(cluster: Cluster, node: str) -> None:
    """Have no leader on a node that is to die: its lease would have to run out first."""
    where = ("-n", OPERATOR_NAMESPACE)
    cluster.kubectl("cordon", node)
    bodies = list_objects(cluster, "pods", OPERATOR_NAMESPACE)
    there = [p["metadata"]["name"] for p in bodies if p["spec"].get("nodeName") == node]
    for name in there:
        cluster.kubectl(*where, "delete", "pod", name)
    if there:
        cluster.kubectl(*where, "wait", "--for=condition=Available", "deployment", "--all", "--timeout=240s")
