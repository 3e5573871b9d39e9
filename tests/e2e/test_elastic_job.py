"""Whole jobs on a real cluster: resizes, the operator killed, power loss, what users type and see."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tests.e2e.conftest import OPERATOR_NAMESPACE, ROOT
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
    assert "created" in job.apply("--steps=900", "--min-step-time=0.2", "--checkpoint-every=50")
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
    before, pods = job.history()[-1]["generation"], job.running_pods()
    for pod in pods:
        job.token(pod)  # asking for it would take longer than the drain
    job.scale(2)
    job.until_draining(pods)
    job.until("the Event of the drain", lambda: "Draining" in job.events(), every_s=0.02)
    kill_operator(cluster)
    job.until_training(2, beyond_step=job.step())
    assert [e["generation"] for e in job.history() if e["generation"] > before] == [before + 1]
    assert job.history()[-1]["cause"] == "ScaledByUser"
    assert job.generations() == {before + 1}
    steps = steps_of(job)
    assert steps[before + 1][0] == steps[before][-1] + 1, "a planned resize repeats no step and skips none"

    # What users type.
    table = job.until("the whole size", lambda: "2/2/2" in (text := cluster.kubectl("get", "hpjob", job.name)) and text)
    assert "Running" in table
    job.until("the Event of the resize", lambda: "Resized" in job.events())
    told = cluster.kubectl("describe", "hpjob", job.name)
    assert all(word in told for word in ("Started", "Draining", "Resized", "2 replicas train in generation"))
    for pod in job.running_pods():
        name = pod["metadata"]["name"]
        assert "group_rank=" in cluster.kubectl("logs", name)
        assert cluster.kubectl("exec", name, "--", "printenv", "NPROC_PER_NODE").strip() == "1"
        told = cluster.kubectl("exec", name, "--", "elastipod", "agent", "status")
        assert f"pod {name}" in told
        assert "running for" in told
        with pytest.raises(HTTPError, match="401") as stranger:
            urlopen(f"http://{pod['status']['podIP']}:8080/status", timeout=5)
        stranger.value.close()
        assert job.token(pod)
        assert job.token(pod) not in cluster.kubectl("logs", name)
    job.delete()
    assert not job.pods()
    job.until(
        "the token to go with its job",
        lambda: not cluster.kubectl("get", "secret", "-l", f"HPJob={job.name}", "-o", "name"),
    )


def test_power_loss(job: JobRun, cluster: Cluster) -> None:
    job.apply("--steps=80", "--min-step-time=0.2", "--checkpoint-every=20", start=4)
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


def test_examples_train_as_they_are(cluster: Cluster) -> None:
    """As users apply them, but that the short one, which may take all nodes first, is shorter still."""
    digits, fsdp2 = JobRun(cluster, "digits"), JobRun(cluster, "lm-fsdp2")
    texts = [(ROOT / "examples" / manifest).read_text() for manifest in ("digits/job.yaml", "lm/job-fsdp2.yaml")]
    assert "--epochs=20" in texts[0]
    try:
        for text in texts:
            cluster.kubectl("apply", "-f", "-", input=text.replace("--epochs=20", "--epochs=4"))
        digits.until("digits to complete", lambda: digits.state() == "Completed", 150)
        fsdp2.until("steps of the sharded model", lambda: fsdp2.step() > 5, 150)
    finally:
        for job in (digits, fsdp2):
            job.delete(wait=False)
        for job in (digits, fsdp2):
            job.delete()
