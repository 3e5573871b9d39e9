"""What tests do to the nodes and the operator below a job, and how they wait for the job to recover."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tests.e2e.conftest import OPERATOR_NAMESPACE
from tests.e2e.host_view import training_processes
from tests.e2e.job_run import JobRun
from tests.objects import get_object
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.processes import ProcessId


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
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        pod = get_object(cluster, "pods", name, OPERATOR_NAMESPACE)
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


@contextmanager
def without_power(cluster: Cluster, node: str) -> Iterator[float]:
    """Cut the power of a node; gives the Unix time of that. Afterwards the node is Ready again."""
    killed_at = time.time()
    cluster.kill_node(node)
    try:
        yield killed_at
    finally:
        cluster.return_node(node)
        cluster.kubectl("wait", "--for=condition=Ready", f"node/{node}", "--timeout=240s")


def one_of_its_nodes(job: JobRun, cluster: Cluster) -> str:
    """A node that trains, and on which the leader does not run."""
    safe = leader(cluster)["spec"]["nodeName"]
    name: str = next(p["spec"]["nodeName"] for p in job.running_pods() if p["spec"]["nodeName"] != safe)
    return name


def recovery_after(job: JobRun, generation: int) -> dict[str, Any]:
    """Wait for the recovery that follows a generation, and give what the history says of it."""

    def recovered() -> list[dict[str, Any]]:
        return [e for e in job.history() if e["generation"] > generation and e["kind"] == "recovery"]

    entry, *_ = job.until("the recovery", recovered)
    return entry


def detected_at(recovery: dict[str, Any]) -> float:
    """The Unix time at which the operator saw what the recovery is from."""
    return datetime.fromisoformat(recovery["detected_at"]).timestamp()


def lost_to_kubernetes_at(cluster: Cluster, node: str) -> float:
    """The Unix time at which Kubernetes called a node lost; infinity where it has not."""
    body = get_object(cluster, "nodes", node)
    (ready,) = (condition for condition in body["status"]["conditions"] if condition["type"] == "Ready")
    return math.inf if ready["status"] == "True" else datetime.fromisoformat(ready["lastTransitionTime"]).timestamp()


def until_in_memory(job: JobRun, before: dict[str, frozenset[ProcessId]], generation: int, staying: int) -> None:
    """Wait until a later generation makes steps; so many pods of before must still have their worker processes."""

    def changed() -> dict[str, Any]:
        entry = job.history()[-1]
        return entry if entry["generation"] > generation and entry["running_at"] else {}

    entry = job.until("the change", changed)
    job.until("steps after it", lambda: len(steps_of(job).get(entry["generation"], ())) > 2)
    after = training_processes(job.name)
    stayed = [pod for pod, processes in before.items() if processes and after.get(pod) == processes]
    assert len(stayed) >= staying, (before, after, job.story())
    assert entry["depth"] == "memory", entry


@contextmanager
def standing_still(job: JobRun) -> Iterator[None]:
    """Stop all ranks of a job for a moment; no two of them are more than a step apart then."""
    workers = [worker for of_pod in training_processes(job.name).values() for worker in of_pod]
    try:
        for worker in workers:
            os.kill(worker.pid, signal.SIGSTOP)
        job.until("all ranks to stand still", lambda: all(worker.is_stopped() for worker in workers))
        yield
    finally:
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)
