"""What cannot train says why; what does not obey or heal is met with more and more force: processes, pods, nodes, the job.

The operator waits half a minute for an agent that never answers, and longer before it gives a deaf one up: both jobs are
begun first, and looked at last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.job_run import JobRun
from tests.nonempty import every

from elastipod_local.cluster import Cluster

CRASHING_SCRIPT = ["hyperpodrun", "--no-python", "python3", "-c", "raise ValueError('the learning rate is missing')"]
NODE = {"env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]}
# Trains until a file says that something is wrong with the node that it is on.
ON_A_BAD_NODE = """
while ! [ -e /data/{job}/bad-$NODE ]; do sleep 0.1; done
echo "RuntimeError: node $NODE counts wrong" >&2
exit 3
"""
# A real agent of which one thing is broken in the first pod of ordinal 1: it says yes to /stop and does nothing.
DEAF_AGENT = """
import os, sys
from elastipod_agent import agent
from elastipod_agent.core.fences import ACT
from elastipod_agent.main import main
if os.environ["ELASTIPOD_POD"].endswith("-worker-1"):
    agent.Agent.stop = lambda self, request: ACT
sys.exit(main(["--no-python", "sleep", "1000"]))
"""
# In its first run rank 1 finds that memory cannot be trusted, and asks for pods made anew.
ASKS_FOR_NEW_PODS = """
import os, time
from hyperpod_elastic_agent.ipc import RestartMode, TrainingManager
agent = TrainingManager().InProcessRestart
os.environ.update(agent.hyperpod_barrier()[1]["worker_envs"])
if os.environ["RANK"] == "1" and os.environ["JOB_RESTART_COUNT"] == "0":
    agent.hyperpod_send_fault(1, RestartMode.JOB_LEVEL_RESTART, "MemoryFault", "memory cannot be trusted")
time.sleep(1000)
"""
# What a user gets to read when a job cannot train, and what the job is: (name, changes, condition, its reason, words in it).
# Of the first two it takes half a minute to see.
SLOW = 2
TROUBLES: list[tuple[str, dict[str, Any], str, str, tuple[str, ...]]] = [
    (
        "no-agent",
        {"command": ["sh", "-c", "trap 'exit 0' TERM; sleep 1000 & wait"]},
        "PodsReady",
        "AgentNotAnswering",
        ("hyperpodrun", "port 8080"),
    ),
    (
        "no-image",
        {"image": "docker.io/elastipod/no-such-image:1", "container": {"imagePullPolicy": "Never"}},
        "PodsReady",
        "ImagePullFailed",
        ("no-such-image", "pull"),
    ),
    (
        "ends",
        {"command": ["sh", "-c", "echo not training; exit 3"]},
        "PodsReady",
        "ContainerEnded",
        ("exit code 3", "hyperpodrun"),
    ),
    (
        "crashes",
        {"command": CRASHING_SCRIPT, "runPolicy": {"jobMaxRetryCount": 1, "cleanPodPolicy": "All"}},
        "Failed",
        "WorkerCrash",
        ("the learning rate is missing", "jobMaxRetryCount 1"),
    ),
    (
        "crashes-again-and-again",
        {"command": CRASHING_SCRIPT},
        "Faulted",
        "WorkerCrash",
        ("the learning rate is missing", "failures in a row", "next attempt"),
    ),
]


def sleeper(cluster: Cluster, name: str, command: list[str], **spec: Any) -> JobRun:
    """Apply a job of one or two small replicas that runs this command."""
    job = JobRun(cluster, name)
    elastic = {
        "minReplicas": 1,
        "maxReplicas": 2,
        "scalingTimeoutInSeconds": 200,
        "gracefulShutdownTimeoutInSeconds": 1,
    }
    policy = spec.pop("elasticPolicy", {})
    job.apply(
        minimum=2, maximum=2, command=command, cpu="100m", container=NODE, elasticPolicy={**elastic, **policy},
        elastipod={"minStableSeconds": 0, "backoff": {"baseSeconds": 1, "maxSeconds": 2}}, **spec,
    )  # fmt: skip
    return job


def data_folder(cluster: Cluster, job: JobRun) -> Path:
    """Give a folder that the job's pods see as /data/<job>."""
    claim = json.loads(cluster.kubectl("get", "pvc", "training-data", "-o", "json"))
    (root,) = cluster.shared.glob(f"*{claim['spec']['volumeName']}*")
    folder = root / job.name
    folder.mkdir(exist_ok=True)
    return folder


def pods_by_name(job: JobRun) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["name"]: pod for pod in job.running_pods()}


def incarnations(job: JobRun) -> set[str]:
    return {pod["metadata"]["labels"]["elastipod.io/incarnation"] for pod in job.running_pods()}


@pytest.fixture(scope="module", autouse=True)
def deaf(cluster: Cluster) -> Iterator[JobRun]:
    """A job that was told to shrink, and whose agent does not listen."""
    pod = {"terminationGracePeriodSeconds": 5}  # it does not listen to SIGTERM either
    job = sleeper(cluster, "deaf-agent", ["python3", "-c", DEAF_AGENT], pod=pod)
    try:
        job.until("both replicas", lambda: job.size() == 2)
        job.scale(1)
        yield job
    finally:
        job.delete()


@pytest.fixture(scope="module", autouse=True)
def troubles(cluster: Cluster) -> Iterator[dict[str, JobRun]]:
    """The jobs of TROUBLES by name, of which the slow ones have begun."""
    jobs = {name: JobRun(cluster, f"trouble-{name}") for name, *_ in TROUBLES}
    try:
        for name, changes, *_ in TROUBLES[:SLOW]:
            jobs[name].apply(minimum=1, maximum=1, step=1, cpu="100m", **changes)
        yield jobs
    finally:
        for job in jobs.values():
            job.delete(wait=False)
        for job in jobs.values():
            job.delete()


@pytest.mark.slow
def test_force_grows_until_it_helps(cluster: Cluster) -> None:
    restarts = {"evalPeriodSeconds": 600, "numRestartBeforeFullJobRestart": 1, "maxFullJobRestarts": 1,
                "maxNumRepeatOffendersToAvoid": 1}  # fmt: skip
    script = ON_A_BAD_NODE.replace("{job}", "bad-node")
    bad = sleeper(
        cluster, "bad-node", ["hyperpodrun", "--no-python", "sh", "-c", script], runPolicy={"restartPolicy": restarts}
    )
    asks = sleeper(
        cluster, "new-pods", ["hyperpodrun", "--inprocess-restart", "--no-python", "python3", "-c", ASKS_FOR_NEW_PODS]
    )
    jobs = (bad, asks)
    try:
        bad.until("both replicas", lambda: bad.size() == 2)
        _new_pods_when_a_worker_asks(asks, cluster)
        _a_bad_node_is_left(bad, cluster)
        _a_job_that_nothing_helps_ends(bad, cluster)
    finally:
        for job in jobs:
            job.delete(wait=False)
        for job in jobs:
            job.delete()


def _new_pods_when_a_worker_asks(job: JobRun, cluster: Cluster) -> None:
    job.until("new pods to train", lambda: job.size() == 2 and incarnations(job) == {"1"})
    status = job.body()["status"]
    assert status["restartStatus"] == {"currentEvalPeriod": 0, "fullJobRestartCount": 1, "restartCount": 0}
    latest = status["latestFaultyPodInstanceList"]
    assert (latest["restartType"], latest["faultyRankList"]) == ("JLR", ["1"])
    entry = job.history()[-1]
    assert (entry["generation"], entry["kind"], entry["to"]) == (2, "recovery", 2)
    job.until_event("FullJobRestart", "a worker requested a job-level restart")


def _a_bad_node_is_left(job: JobRun, cluster: Cluster) -> None:
    """The first fault costs new processes in the same pods; the second one all pods, which keep away from the node."""
    before = pods_by_name(job)
    node = before[min(before)]["spec"]["nodeName"]
    marker = data_folder(cluster, job) / f"bad-{node}"
    marker.touch()
    job.until("new processes", lambda: len(job.history()) >= 2)
    job.until("new pods to train", lambda: job.size() == 2 and incarnations(job) == {"1"})
    history = [(e["generation"], e["kind"], e["cause"]) for e in job.history()]
    assert history == [(1, "start", "JobCreated"), (2, "recovery", "WorkerCrash"), (3, "recovery", "WorkerCrash")]
    for pod in job.running_pods():
        assert pod["spec"]["nodeName"] != node
        assert pod["metadata"]["annotations"]["elastipod.io/avoids"] == node
    status = job.body()["status"]
    assert status["restartStatus"] == {"currentEvalPeriod": 0, "fullJobRestartCount": 1, "restartCount": 0}
    latest = status["latestFaultyPodInstanceList"]
    assert (latest["restartType"], latest["faultyInstanceIdList"]) == ("JLR", [node])
    job.until_event("NodeAvoided", f"node {node} had 2 faults")
    job.until_event("FullJobRestart", "more than numRestartBeforeFullJobRestart 1")


def _a_job_that_nothing_helps_ends(job: JobRun, cluster: Cluster) -> None:
    for pod in job.running_pods():
        (data_folder(cluster, job) / f"bad-{pod['spec']['nodeName']}").touch()
    job.until("the end", lambda: job.state() == "Failed")
    last = job.condition("Failed")
    assert last["reason"] == "WorkerCrash"
    assert "counts wrong" in last["message"], "the first failing rank's own words"
    assert "maxFullJobRestarts 1 is used up" in last["message"]
    assert job.body()["status"]["restartCount"] == 4


def test_jobs_that_cannot_train_say_why(troubles: dict[str, JobRun]) -> None:
    for name, changes, *_ in TROUBLES[SLOW:]:
        troubles[name].apply(minimum=1, maximum=1, step=1, cpu="100m", **changes)
    for name, _, kind, reason, words in TROUBLES:
        told = troubles[name].until(f"{kind} {reason}", partial(troubles[name].told, kind, reason))
        assert every(word in told for word in words), (name, told)


@pytest.mark.slow
def test_a_deaf_agent_loses_its_pod(deaf: JobRun) -> None:
    """Asked, told, and then given up; the others go on, and the next pod in its place does what it is told."""
    job = deaf
    job.until("the other replica to go on alone", lambda: job.size() == 1)
    assert [e["to"] for e in job.history()] == [2, 1]
    assert every(pod["metadata"]["name"].endswith("-worker-0") for pod in job.running_pods())
    assert job.body()["status"]["restartCount"] == 0, "nobody was at fault"
    job.be_quick()
    job.scale(2)
    job.until("a new pod in its place", lambda: job.size() == 2 and incarnations(job) == {"0", "1"})
