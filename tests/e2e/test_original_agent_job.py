"""Our operator with pods whose agent is the original one: a resize, a crash, Completed, and nothing sent that only we know."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.agent_process import suspend
from tests.e2e.host_view import workers_of_pod
from tests.e2e.job_run import AGENT_PORT, JobRun
from tests.nonempty import every
from tests.peers import peer_packages

from elastipod_local.cluster import Cluster

HERE = Path(__file__).resolve().parent
PACKAGES = "/opt/original"  # read-only in the pods; wins over the image's own packages, which are ours
INNER_PORT = 8081
STEP_S, SAVE_EVERY = 0.1, 20  # the latter as in original_training.py
REMAINDER = 25  # steps that are left when the crash is repaired
# The agent becomes PID 1 as in its own images; the recorder goes with the pod.
COMMAND = f"""
python3 /scripts/original_recorder.py {AGENT_PORT} {INNER_PORT} /data/$JOB/requests-$(hostname) &
exec python3 -c 'from hyperpod_elastic_agent.run import main; main()' --server-port={INNER_PORT} --nnodes=$NNODES \
--nproc-per-node=$NPROC_PER_NODE /scripts/original_training.py /data/$JOB {STEP_S}
"""


def manifest_spec(name: str, replicas: int) -> dict[str, Any]:
    """Give the spec of a job with the original agent, its packages from this machine's cache of peers."""
    env = {
        "PYTHONPATH": PACKAGES,
        "JOB": name,
        "OMP_NUM_THREADS": "1",
        "HYPERPOD_SIGNAL_COORDINATION": "distributed",
    }
    container = {
        "name": "trainer",
        "image": "docker.io/elastipod/train:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["sh", "-c", f"mkdir -p /data/$JOB{COMMAND}"],
        "env": [{"name": key, "value": value} for key, value in env.items()],
        "resources": {"requests": {"cpu": "600m", "memory": "256Mi"}},
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "packages", "mountPath": PACKAGES, "readOnly": True},
            {"name": "scripts", "mountPath": "/scripts", "readOnly": True},
        ],
    }
    volumes = [
        {"name": "data", "persistentVolumeClaim": {"claimName": "training-data"}},
        {"name": "packages", "hostPath": {"path": str(peer_packages("original")), "type": "Directory"}},
        {"name": "scripts", "configMap": {"name": name}},
    ]
    template = {"spec": {"containers": [container], "volumes": volumes}}
    return {
        "nprocPerNode": "1",
        "replicas": replicas,
        "elasticPolicy": {
            "minReplicas": 2,
            "maxReplicas": 3,
            "replicaIncrementStep": 1,
            "scalingTimeoutInSeconds": 1,
            "gracefulShutdownTimeoutInSeconds": 240,
        },
        "elastipod": {"minStableSeconds": 1},
        "replicaSpecs": [{"name": "worker", "replicas": 2, "maxReplicas": 3, "template": template}],
    }


@pytest.fixture
def scripts(job: JobRun, cluster: Cluster) -> Iterator[None]:
    """The scripts of the pods, in a ConfigMap named as the job."""
    files = (HERE / "original_recorder.py", HERE / "original_training.py")
    cluster.kubectl("create", "configmap", job.name, *(f"--from-file={file}" for file in files))
    yield
    cluster.kubectl("delete", "configmap", job.name)


def folder(job: JobRun) -> Path:
    """What the pods see as /data/<job>. Raises StopIteration before it is there."""
    return next(iter(job.cluster.shared.glob(f"*/{job.name}")))


def lines(path: Path) -> list[dict[str, Any]]:
    """Give the complete lines of a file of JSON lines."""
    written, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in written.splitlines()]


def steps_of(job: JobRun) -> list[dict[str, Any]]:
    """The steps that rank 0 made, in all generations."""
    return lines(folder(job) / "steps-0")


def last_step(job: JobRun) -> int:
    """The newest of them."""
    return int(steps_of(job)[-1]["step"]) if steps_of(job) else 0


def stops_far_from_a_checkpoint(job: JobRun, worker: int) -> bool:
    """Stop a worker, and with it the others, which wait for it in their next step; let it go on near a checkpoint."""
    suspend(psutil.Process(worker))
    if 2 <= last_step(job) % SAVE_EVERY <= 8:
        return True
    os.kill(worker, signal.SIGCONT)
    return False


def write_whole(path: Path, text: str) -> None:
    """Write a file that nobody can see half."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


@pytest.mark.long("differential")
def test_a_job_with_the_original_agent(job: JobRun, cluster: Cluster, scripts: None) -> None:
    job.spec = manifest_spec(job.name, replicas=2)
    assert "created" in job.apply_again()
    job.until("two replicas", lambda: job.size() == 2)
    job.until("steps", lambda: last_step(job) > 5)

    job.scale(3)
    job.until("three replicas", lambda: job.size() == 3)
    resized_at = last_step(job)
    job.until("steps beyond a checkpoint", lambda: last_step(job) > resized_at + SAVE_EVERY + 2)

    victim, *_ = workers_of_pod(job.running_pods()[0]["metadata"]["uid"])
    job.until("steps that are far from any checkpoint", lambda: stops_far_from_a_checkpoint(job, victim), every_s=0.02)
    os.kill(victim, signal.SIGKILL)
    job.until("steps after the recovery", lambda: steps_of(job)[-1]["restart"] == 2)
    last = last_step(job) + REMAINDER
    write_whole(folder(job) / "last", str(last))
    job.until("completion", lambda: job.state() == "Completed")

    history = [(e["generation"], e["from"], e["to"], e["kind"], e["cause"]) for e in job.history()]
    assert history == [
        (1, 0, 2, "start", history[0][4]),
        (2, 2, 3, "resize", "CapacityAvailable"),
        (3, 3, 3, "recovery", "WorkerCrash"),
    ]
    print("decided, running:", [(e["detected_at"], e["at"], e["running_at"]) for e in job.history()])
    assert job.body()["status"]["restartCount"] == 1
    assert_steps(steps_of(job), last)
    assert_plain_requests(job)


def assert_steps(steps: list[dict[str, Any]], last: int) -> None:
    """A planned resize repeats nothing; a crash goes back to the last checkpoint; the other torch did it all."""
    assert {line["torch"].split("+")[0] for line in steps} == {"2.11.0"}
    runs = [[line["step"] for line in steps if line["restart"] == restart] for restart in range(3)]
    assert [{line["world_size"] for line in steps if line["restart"] == n} for n in range(3)] == [{2}, {3}, {3}]
    assert every(run == list(range(run[0], run[-1] + 1)) for run in runs)
    assert runs[0][0] == 1
    assert runs[1][0] == runs[0][-1] + 1, "the resize repeats no step and skips none"
    assert runs[2][0] == runs[1][-1] // SAVE_EVERY * SAVE_EVERY + 1, "the crash goes back to the last checkpoint"
    assert runs[2][-1] == last


def assert_plain_requests(job: JobRun) -> None:
    """The original is spoken to as it knows it: no field and no query that only our agents understand."""
    records = sorted(folder(job).glob("requests-*"))
    assert len(records) == 3
    for path in records:
        requests = lines(path)
        targets = {request["head"].split("\r\n")[0] for request in requests}
        calls = {
            f"{method} {call} HTTP/1.1" for method, call in (("POST", "/start"), ("POST", "/stop"), ("GET", "/status"))
        }
        assert calls <= targets <= {*calls, "POST /shutdown HTTP/1.1"}
        bodies = [json.loads(request["body"]) for request in requests if request["body"]]
        assert not any("generation" in body for body in bodies)
        assert not any(body.get("spare") for body in bodies)
        assert not [body for body in bodies if type(body.get("timeout", 0)) is not int]
        assert [body["faultCount"] for body in bodies if "rank" in body] in ([0, 1, 2], [1, 2])
