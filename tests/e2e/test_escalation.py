"""What does not obey or heal is met with more and more force: processes, pods, nodes, and in the end the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.job_run import JobRun

from elastipod_local.cluster import Cluster

pytestmark = pytest.mark.timeout(180)

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
if os.environ["ELASTIPOD_POD"].endswith("-1-0"):
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


def sleeper(cluster: Cluster, name: str, command: list[str], **spec: Any) -> JobRun:
    """Apply a job of one or two small replicas that runs this command."""
    job = JobRun(cluster, name)
    elastic = {"minReplicas": 1, "maxReplicas": 2, "scalingTimeoutInSeconds": 30, "gracefulShutdownTimeoutInSeconds": 1}
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


def event_reasons(cluster: Cluster, job: JobRun) -> dict[str, str]:
    """Give the messages of the job's Events by their reasons."""
    listed = cluster.kubectl("get", "events", "--field-selector", f"involvedObject.name={job.name}", "-o", "json")
    return {event["reason"]: event["message"] for event in json.loads(listed)["items"]}


def test_force_grows_until_it_helps(cluster: Cluster) -> None:
    restarts = {"evalPeriodSeconds": 600, "numRestartBeforeFullJobRestart": 1, "maxFullJobRestarts": 1,
                "maxNumRepeatOffendersToAvoid": 1}  # fmt: skip
    script = ON_A_BAD_NODE.replace("{job}", "bad-node")
    bad = sleeper(
        cluster, "bad-node", ["hyperpodrun", "--no-python", "sh", "-c", script], runPolicy={"restartPolicy": restarts}
    )
    deaf = sleeper(cluster, "deaf-agent", ["python3", "-c", DEAF_AGENT])
    asks = sleeper(
        cluster, "new-pods", ["hyperpodrun", "--inprocess-restart", "--no-python", "python3", "-c", ASKS_FOR_NEW_PODS]
    )
    jobs = (bad, deaf, asks)
    try:
        for job in (bad, deaf):
            job.until("both replicas", lambda job=job: job.size() == 2)
        deaf.scale(1)
        _new_pods_when_a_worker_asks(asks, cluster)
        _a_bad_node_is_left(bad, cluster)
        _a_job_that_nothing_helps_ends(bad, cluster)
        _a_deaf_agent_loses_its_pod(deaf, cluster)
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
    assert "a worker asked for a job-level restart" in event_reasons(cluster, job)["FullJobRestart"]


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
    told = event_reasons(cluster, job)
    assert f"node {node} was behind 2 faults" in told["NodeAvoided"]
    assert "more than numRestartBeforeFullJobRestart 1" in told["FullJobRestart"]


def _a_job_that_nothing_helps_ends(job: JobRun, cluster: Cluster) -> None:
    for pod in job.running_pods():
        (data_folder(cluster, job) / f"bad-{pod['spec']['nodeName']}").touch()
    job.until("the end", lambda: job.state() == "Failed")
    last = job.condition("Failed")
    assert last["reason"] == "WorkerCrash"
    assert "counts wrong" in last["message"], "the first failing rank's own words"
    assert "maxFullJobRestarts 1 is used up" in last["message"]
    assert job.body()["status"]["restartCount"] == 4


def _a_deaf_agent_loses_its_pod(job: JobRun, cluster: Cluster) -> None:
    """Asked, told, and then given up; the others go on, and the next pod in its place does what it is told."""
    job.until("the other replica to go on alone", lambda: job.size() == 1, 90)
    assert [e["to"] for e in job.history()] == [2, 1]
    assert all(pod["metadata"]["name"].endswith("-0-0") for pod in job.running_pods())
    assert job.body()["status"]["restartCount"] == 0, "nobody was at fault"
    job.scale(2)
    job.until("a new pod in its place", lambda: job.size() == 2 and incarnations(job) == {"0", "1"})
