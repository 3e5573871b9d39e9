"""The field's own client, `hyp`, makes a job on a real cluster, looks into it and takes it away; a chart is waited for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.hyp_client import Hyp
from tests.e2e.job_run import JobRun
from tests.objects import list_objects

from elastipod_local.cluster import Cluster

KILL_WORKER = (
    "import os, signal; os.kill(int(next(p for p in os.listdir('/proc') if p.isdigit() and IS)), signal.SIGKILL)"
)
IS_WORKER = "b'LOCAL_RANK=' in open(f'/proc/{p}/environ', 'rb').read()"


@pytest.fixture(scope="module")
def hyp(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hyp]:
    client = Hyp(cluster, tmp_path_factory.mktemp("hyp"), ("default",))
    try:
        yield client
    finally:
        client.close()


def create(hyp: Hyp, name: str) -> str:
    """Make an elastic job, 2 to 4 replicas, as the client's manual has it. Its workers ask for no event."""
    train = "hyperpodrun, --nnodes=2:4, --no-python, python3, -u, -c, print('training'); import time; time.sleep(1000)"
    return hyp.succeed(
        "create", "hyp-pytorch-job", "--version", "1.1", "--job-name", name, "--image", "docker.io/elastipod/train:dev",
        "--pull-policy", "IfNotPresent", "--tasks-per-node", "1", "--replica-count", "2", "--max-replica-count", "4",
        "--elastic-replica-increment-step", "2", "--elastic-scaling-timeout-in-seconds", "1",
        "--elastic-graceful-shutdown-timeout-in-seconds", "1", "--max-retry", "3",
        "--environment", '{"OMP_NUM_THREADS": "1"}', "--command", f"[{train}]",
        "--volume", "name=data,type=pvc,mount_path=/data,claim_name=training-data,read_only=false",
    )  # fmt: skip


def states_since_start(hyp: Hyp, name: str) -> list[str]:
    """Give how the job was listed, from the first look of the operator at it on."""
    states = hyp.order[name]
    return states[1:] if states[0] == "Unknown" else states


@pytest.mark.long("hyp")
def test_hyp_from_create_to_delete(job: JobRun, cluster: Cluster, hyp: Hyp) -> None:
    of_job = ("hyp-pytorch-job", "--job-name", job.name)
    assert f"Successfully submitted HyperPodPytorchJob '{job.name}'" in create(hyp, job.name)
    job.until("4 replicas", lambda: job.size() == 4)
    names = {pod["metadata"]["name"] for pod in job.running_pods()}
    listed = hyp.succeed("list-pods", *of_job)
    assert set(re.findall(rf"{job.name}-pod-\S+", listed)) == names

    first = min(names)
    logs = hyp.succeed("get-logs", *of_job, "--pod-name", first)
    assert re.search(r"^20\d\d-\d\d-\d\dT\S+Z \[default0\]:training$", logs, re.MULTILINE), logs[:2000]
    assert re.search(r"group_rank=\d", logs), logs[:2000]

    said = hyp.succeed("exec", *of_job, "--all-pods", "--", "cat", "/etc/hostname")
    assert {name: said.count(name) for name in names} == dict.fromkeys(names, 2), said
    said = hyp.succeed("exec", *of_job, "--pod", first, "--", "printenv", "NPROC_PER_NODE")
    assert said.split()[-1] == "1"

    operator = hyp.succeed("get-operator-logs", "hyp-pytorch-job", "--since-hours", "1")
    mine = [line for line in operator.splitlines() if f"default/{job.name}" in line]
    assert any('"generation allocated"' in line for line in mine), operator[-3000:]

    # A fault, a suspension and the way back: the client shows each, and never that it does not know.
    restarts = job.body()["status"]["restartCount"]
    script = KILL_WORKER.replace("IS", IS_WORKER)
    hyp.succeed("exec", *of_job, "--pod", first, "--", "python3", "-c", script)
    job.until("the recovery", lambda: job.body()["status"]["restartCount"] == restarts + 1)
    job.until("4 replicas", lambda: job.size() == 4)
    suspend(cluster, job, True)
    job.until("hyp to show the suspension", lambda: hyp.order[job.name][-1] == "Suspended")
    suspend(cluster, job, False)
    told = "4 replicas train in generation"
    job.until("the condition to tell of 4 replicas", lambda: told in job.condition("Running").get("message", ""))
    assert told in hyp.succeed("describe", *of_job)

    hyp.succeed("delete", *of_job)
    job.until("the job to be gone", lambda: not job.pods() and not exists(cluster, job.name))
    states = states_since_start(hyp, job.name)
    assert set(states) <= {"Created", "PodsRunning", "Running", "Suspended"}
    assert states.count("Suspended") == 1
    assert states[states.index("Running") :][:2] == ["Running", "Suspended"], "growth and recovery are no other state"
    assert hyp.problems == []


def suspend(cluster: Cluster, job: JobRun, wanted: bool) -> None:
    patch = json.dumps({"spec": {"runPolicy": {"suspend": wanted}}})
    cluster.kubectl("patch", "hpjob", job.name, "--type=merge", "-p", patch)


def exists(cluster: Cluster, name: str) -> bool:
    return any(body["metadata"]["name"] == name for body in list_objects(cluster, "hyperpodpytorchjobs", "default"))


@pytest.mark.slow
def test_a_chart_with_a_job_is_installed_and_waited_for(job: JobRun, cluster: Cluster, tmp_path: Path) -> None:
    """As the recipes' launcher does it: a rendered chart with the job and its configuration, `helm install --wait`."""
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text(f"apiVersion: v2\nname: {job.name}\nversion: 0.1.0\n")
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"training-config-{job.name}"}}
    (chart / "templates" / "config.yaml").write_text(json.dumps(config | {"data": {"config-n1.yaml": "size: 1\n"}}))
    container = {
        "name": "pytorch", "image": "docker.io/elastipod/train:dev", "imagePullPolicy": "IfNotPresent",
        "command": ["hyperpodrun", "--no-python", "sleep", "1000"],
        "volumeMounts": [{"name": "training-config", "mountPath": "/config"}],
    }  # fmt: skip
    volume = {"name": "training-config", "configMap": {"name": f"training-config-{job.name}"}}
    body = {
        "apiVersion": "sagemaker.amazonaws.com/v1", "kind": "HyperPodPyTorchJob", "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": "1",
            "elasticPolicy": {"minReplicas": 1, "maxReplicas": 2, "replicaIncrementStep": None, "replicaDiscreteValues": [1, 2],
                              "gracefulShutdownTimeoutInSeconds": 1},
            "runPolicy": {"cleanPodPolicy": "None", "suspend": "SUSPEND"},
            "replicaSpecs": [{"name": "1-nodes", "replicas": 1, "maxReplicas": 2,
                              "template": {"spec": {"containers": [container], "volumes": [volume]}}}],
        },
    }  # fmt: skip
    text = json.dumps(body).replace('"SUSPEND"', "{{ .Values.suspend }}")
    (chart / "templates" / "training.yaml").write_text(text)
    wait = ("--wait", "--timeout=240s")
    cluster.helm("install", job.name, str(chart), *wait, "--set", "suspend=false")
    job.until("the training", lambda: job.state() == "Running")
    cluster.helm("upgrade", job.name, str(chart), *wait, "--set", "suspend=true")
    job.until("the suspension", lambda: job.state() == "Suspended" and not job.pods())
    cluster.helm("upgrade", job.name, str(chart), *wait, "--set", "suspend=false")
    job.until("the training to go on", lambda: job.state() == "Running" and job.size() > 0)
    releases = json.loads(cluster.helm("list", "-o", "json"))
    assert [(r["name"], r["status"], r["revision"]) for r in releases] == [(job.name, "deployed", "3")]
    cluster.helm("uninstall", job.name, *wait)
    assert not exists(cluster, job.name)
