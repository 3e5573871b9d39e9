"""The original's launch manifests for checkpointless training live on the local cluster, with a stand-in for their script.

Their command lines and variables are as tests/api/compat has them; test_compat.py has them at their own size, with played agents.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.compat_jobs import job_of
from tests.e2e.host_view import workers_of_pod
from tests.e2e.job_run import JobRun
from tests.nonempty import every
from tests.unit.compat.test_command_lines import INPROCESS, OF_THE_IMAGE

from elastipod_local.cluster import Cluster

SCRIPT = Path(__file__).with_name("checkpointless_training.py")
OF_IMAGE = "image"  # a ConfigMap of what the original's image has beside ours
PODS, RANKS = 2, 16
LABEL = "beta.kubernetes.io/instance-type=ml.p5.48xlarge"
SAID = re.compile(
    r"RANK (?P<rank>\d+) of (?P<of>\d+) pid (?P<pid>\d+) run (?P<run>\d+) held (?P<held>\d+) from (?P<first>\d+)"
)
CLAIM = {
    "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "fsx-claim"},
    "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "elastipod-shared",
             "resources": {"requests": {"storage": "1Gi"}}},
}  # fmt: skip


def job_here(manifest: str) -> dict[str, Any]:
    """Give the job of a manifest with our image, on two nodes without devices."""
    body = job_of(manifest)
    (replica_spec,) = body["spec"]["replicaSpecs"]
    replica_spec["replicas"] = PODS
    pod = replica_spec["template"]["spec"]
    (container,) = pod["containers"]
    del container["resources"]
    container |= {"image": "docker.io/elastipod/train:dev", "imagePullPolicy": "IfNotPresent"}
    (entry,) = (e["value"] for e in container["env"] if e["name"] == "ENTRYPOINT")
    paths = {"script": entry, "ip": "/usr/local/bin/ip", "sysctl": "/usr/local/bin/sysctl"}
    container["volumeMounts"] += [
        *({"name": OF_IMAGE, "mountPath": path, "subPath": name} for name, path in paths.items()),
        {"name": "ofi", "mountPath": "/opt/aws-ofi-nccl/lib"},
    ]
    pod["volumes"] += [
        {"name": OF_IMAGE, "configMap": {"name": OF_IMAGE, "defaultMode": 0o755}},
        {"name": "ofi", "emptyDir": {}},
    ]
    return body


@pytest.fixture(scope="module")
def site(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with what the manifests take for granted."""
    route = """awk '$2 == "00000000" { print "default via gateway dev", $1 }' /proc/net/route"""
    programs = {**OF_THE_IMAGE, "ip": f'case "$*" in *route*) {route} ;; esac'}
    data = {name: f"#!/bin/sh\n{programs[name]}\n" for name in ("ip", "sysctl")} | {"script": SCRIPT.read_text()}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": OF_IMAGE}, "data": data}
    cluster.kubectl(
        "apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": [config, CLAIM]})
    )
    cluster.kubectl("label", "nodes", "--all", LABEL)
    yield cluster
    cluster.kubectl("label", "nodes", "--all", LABEL.partition("=")[0] + "-")
    cluster.kubectl("delete", f"configmap/{OF_IMAGE}", "pvc/fsx-claim", "--wait=false")


class Life:
    """One job, and what its ranks printed into the files that its command line names."""

    def __init__(self, site: Cluster, manifest: str) -> None:
        self.body = job_here(manifest)
        self.job = JobRun(site, self.body["metadata"]["name"])
        self.site = site

    def output(self) -> Path:
        claim = json.loads(self.site.kubectl("get", "pvc", "fsx-claim", "-o", "json"))
        return Path(self.site.shared, claim["spec"]["volumeName"], "trainer", "output")

    def printed(self) -> str:
        return "".join(path.read_text() for path in self.output().glob(f"logs/{self.job.name}/*/train-*.log"))

    def run(self, number: int, ranks: int = RANKS) -> dict[int, dict[str, int]]:
        """Wait until that many ranks are in a run; give what each said when it began."""

        def begun() -> list[dict[str, int]]:
            said = [{key: int(text) for key, text in m.groupdict().items()} for m in SAID.finditer(self.printed())]
            found = [each for each in said if each["run"] == number]
            return found if len(found) == ranks else []

        found = self.job.until(f"{ranks} ranks in run {number}", begun)
        assert every(each["of"] == ranks for each in found)
        assert len({each["first"] for each in found}) == 1
        return {each["rank"]: each for each in found}

    def scaling_is_refused(self) -> None:
        self.job.scale(PODS + 1)
        told = self.job.until("the refusal", lambda: self.job.condition("Warning").get("message", ""))
        assert f"spec.replicas is {PODS + 1}" in told
        self.job.scale(0)

    def shrink_by_an_edit(self) -> None:
        replica_spec = {**self.body["spec"]["replicaSpecs"][0], "replicas": 1}
        spec = {"replicaSpecs": [replica_spec], "elastipod": {"gracefulShutdownTimeoutInSeconds": 1}}
        self.site.kubectl("patch", "hpjob", self.job.name, "--type=merge", "-p", json.dumps({"spec": spec}))


def pids(run: dict[int, dict[str, int]]) -> dict[int, int]:
    return {rank: each["pid"] for rank, each in run.items()}


def live(site: Cluster, manifest: str) -> None:
    life = Life(site, manifest)
    job = life.job
    try:
        site.kubectl("apply", "--validate=strict", "-f", "-", input=json.dumps(life.body))
        first = life.run(0)
        assert every(each["first"] == 0 for each in first.values())
        second = life.run(1)  # rank 8 has raised, as its arguments say
        assert pids(second) == pids(first), "nobody has a new process, not even the rank that failed"
        assert every(each["held"] > 0 for each in second.values())

        life.scaling_is_refused()

        one, _ = sorted(job.running_pods(), key=lambda pod: str(pod["metadata"]["name"]))
        os.kill(workers_of_pod(one["metadata"]["uid"])[0], signal.SIGKILL)
        third = life.run(2)
        new = [rank for rank in third if third[rank]["pid"] != second[rank]["pid"]]
        assert len(new) == 1
        assert third[new[0]]["held"] == 0 < third[new[0]]["first"], "it has what the others kept"

        life.shrink_by_an_edit()
        fourth = life.run(3, RANKS // PODS)
        assert set(pids(fourth).values()) <= set(pids(third).values())

        (life.output() / "finish").touch()
        job.until("completion", lambda: job.state() == "Completed")
        assert life.printed().count("finished 50 whole True rootless 1") == RANKS // PODS
        _, raised, killed, shrunk = [(each["kind"], each["cause"], each.get("depth")) for each in job.history()]
        assert raised == ("recovery", "WorkerFault", "memory")
        # The peers of the killed rank lose their collective, and their agent may report that first.
        assert killed in [("recovery", cause, "memory") for cause in ("WorkerCrash", "WorkerFault")]
        assert shrunk == ("resize", "ScaledByUser", "memory")
    finally:
        job.delete(wait=False)  # half a minute: the shell that is a pod's first process is deaf to SIGTERM
        (life.output() / "finish").unlink(missing_ok=True)


@pytest.mark.long("checkpointless")
@pytest.mark.parametrize("manifest", sorted(INPROCESS))
def test_a_launch_manifest_lives(site: Cluster, manifest: str) -> None:
    live(site, manifest)
