"""Whole jobs on a real cluster: resizes, the operator killed, power loss, what users type and see."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import OPERATOR_NAMESPACE
from tests.e2e.job_run import JobRun

from elastipod_local.cluster import Cluster

DETECTION_LIMIT_S = 15.0


def leader(cluster: Cluster) -> dict[str, Any]:
    """The operator's pod that holds the lease."""
    where = ("-n", OPERATOR_NAMESPACE, "get")
    holder = cluster.kubectl(*where, "lease", "elastipod-operator", "-o", "jsonpath={.spec.holderIdentity}")
    pod: dict[str, Any] = json.loads(cluster.kubectl(*where, "pod", holder, "-o", "json"))
    return pod


def kill_operator(cluster: Cluster) -> None:
    """End the leader's process with SIGKILL, from outside as the kernel would, and wait until its container is back."""
    before = leader(cluster)
    uid, name = before["metadata"]["uid"], before["metadata"]["name"]
    restarts = before["status"]["containerStatuses"][0]["restartCount"]
    victims = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_operator(pid, uid)]
    assert victims, "the operator's process was not found"
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pod = json.loads(cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "pod", name, "-o", "json"))
        container = pod["status"]["containerStatuses"][0]
        if container["restartCount"] > restarts and container["ready"]:
            return
        time.sleep(0.3)
    raise AssertionError("the operator did not come back")


def _is_operator(pid: int, pod_uid: str) -> bool:
    try:
        return (
            pod_uid in Path(f"/proc/{pid}/cgroup").read_text()
            and b"operator" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
    except OSError:
        return False


def steps_of(job: JobRun) -> dict[int, list[int]]:
    """Steps that rank 0 made, by generation, from the sample logs."""
    found: dict[int, list[int]] = {}
    for path in sorted(job.samples().glob("gen-*-rank-00000.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        found[int(path.name.split("-")[1])] = [line["step"] for line in lines if line["kind"] == "step"]
    return found


def test_user_scales_and_the_operator_dies(job: JobRun, cluster: Cluster) -> None:
    assert "created" in job.apply("--steps=400", "--step-delay=0.2", "--checkpoint-every=50")
    job.until_training(4)
    assert "unchanged" in job.apply_again()

    # The operator is killed while training: nobody notices.
    pids, generations, step = job.worker_pids(), job.generations(), job.step()
    assert all(len(of_pod) == 1 for of_pod in pids.values())
    kill_operator(cluster)
    job.until("training to go on", lambda: job.step() > step + 3)
    assert job.worker_pids() == pids
    assert job.generations() == generations

    # Killed in the middle of a resize: exactly one more generation, same result.
    before = job.history()[-1]["generation"]
    job.scale(2)
    job.until("the drain", lambda: "stopping" in {job.agent(p)["status"] for p in job.running_pods()}, 20)
    kill_operator(cluster)
    job.until_training(2, beyond_step=job.step())
    assert [e["generation"] for e in job.history() if e["generation"] > before] == [before + 1]
    assert job.history()[-1]["cause"] == "ScaledByUser"
    assert job.generations() == {before + 1}
    steps = steps_of(job)
    assert steps[before + 1][0] == steps[before][-1] + 1, "a planned resize repeats no step and skips none"

    # What users type.
    table = cluster.kubectl("get", "hpjob", job.name)
    assert "Running" in table
    assert "2/2/2" in table
    told = cluster.kubectl("describe", "hpjob", job.name)
    assert all(word in told for word in ("Started", "Draining", "Resized", "2 replicas train in generation"))
    for pod in job.running_pods():
        name = pod["metadata"]["name"]
        assert "group_rank=" in cluster.kubectl("logs", name)
        assert cluster.kubectl("exec", name, "--", "printenv", "NPROC_PER_NODE").strip() == "1"
    job.delete()
    assert not job.pods()


def test_power_loss(job: JobRun, cluster: Cluster) -> None:
    job.apply("--steps=150", "--step-delay=0.1", "--checkpoint-every=20")
    job.until_training(4, beyond_step=25)
    safe = leader(cluster)["spec"]["nodeName"]
    victim = next(p["spec"]["nodeName"] for p in job.running_pods() if p["spec"]["nodeName"] != safe)
    killed_at = time.time()
    cluster.kill_node(victim)
    try:
        job.until("the recovery", lambda: [e for e in job.history() if e["kind"] == "recovery"], 60)
        entry = next(e for e in job.history() if e["kind"] == "recovery")
        detected = datetime.fromisoformat(entry["detected_at"]).timestamp() - killed_at
        print(f"power loss of {victim} detected after {detected:.1f} s, cause {entry['cause']}")
        assert 0 < detected <= DETECTION_LIMIT_S, job.story()
        assert (entry["from"], entry["to"]) == (4, 2)
        job.until("completion", lambda: job.state() == "Completed", 150)
    finally:
        cluster.return_node(victim)
        cluster.kubectl("wait", "--for=condition=Ready", f"node/{victim}", "--timeout=60s")
    audit = job.audit()
    assert audit["exit_code"] == 0, audit
    assert job.body()["status"]["restartCount"] == 1


@pytest.mark.parametrize(
    ("case", "changes", "reason", "words"),
    [
        pytest.param(
            "no-agent",
            {"command": ["sleep", "1000"]},
            "AgentNotAnswering",
            ("hyperpodrun", "port 8080"),
            id="a container that does not start hyperpodrun",
        ),
        pytest.param(
            "no-image",
            {"image": "docker.io/elastipod/no-such-image:1", "container": {"imagePullPolicy": "Never"}},
            "ImagePullFailed",
            ("no-such-image", "pull"),
            id="an image that cannot be pulled",
        ),
        pytest.param(
            "ends",
            {"command": ["sh", "-c", "echo not training; exit 3"]},
            "ContainerEnded",
            ("exit code 3", "hyperpodrun"),
            id="a container that ends by itself",
        ),
    ],
)
def test_trouble(cluster: Cluster, case: str, changes: dict[str, object], reason: str, words: tuple[str, ...]) -> None:
    job = JobRun(cluster, f"trouble-{case}")
    try:
        job.apply(minimum=1, maximum=1, step=1, **changes)  # type: ignore[arg-type]
        condition = job.until(reason, lambda: (c := job.condition("PodsReady")).get("reason") == reason and c, 60)
        assert all(word in condition["message"] for word in words), condition
    finally:
        job.delete()


def test_script_that_crashes(cluster: Cluster) -> None:
    job = JobRun(cluster, "crasher")
    try:
        script = "raise ValueError('the learning rate is missing')"
        command = ["hyperpodrun", "--no-python", "python3", "-c", script]
        job.apply(minimum=1, maximum=1, step=1, command=command, runPolicy={"jobMaxRetryCount": 1})
        job.until("the job to fail", lambda: job.state() == "Failed", 60)
        message = job.condition("Failed")["message"]
        assert "the learning rate is missing" in message
        assert "jobMaxRetryCount" in message
    finally:
        job.delete()
