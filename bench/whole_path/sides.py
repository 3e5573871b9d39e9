"""The two kinds of jobs that are compared on one cluster and in one queue: an elastic job, and a Job of Kubernetes."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common.processes import Failed, until
from bench.launchers import steplog
from bench.launchers.nodes import MEMORY_SCRIPT, SCRIPT
from bench.operator_load.api import ApiClient
from bench.whole_path.worlds import Worlds
from tests.e2e.job_run import JobRun
from tests.e2e.recoveries import detected_at, one_of_its_nodes, recovery_after

from elastipod_local.cluster import Cluster

Add = Callable[[str, float], None]
GROW, SHRINK, CRASH, EARLY_CRASH, NODE_LOSS = "grow 2->4", "shrink 4->2", "crash", "early crash", "node loss"
MEMORY, PROCESS, BATCH_JOB = "memory", "process", "batch/Job"
SCRIPTS = {MEMORY: MEMORY_SCRIPT, PROCESS: SCRIPT, BATCH_JOB: SCRIPT}
EARLY_S = 5.0  # after a start the agent prepares the next one; a crash before finds nothing prepared
IMAGE = "docker.io/elastipod/train:dev"
CPU = "600m"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
MASTER_PORT = 29400
END_WITHIN_S = 90.0
OWN_LOGS = 'export BENCH_LOGS=/data/$JOB/logs/$(cat /proc/sys/kernel/random/uuid); mkdir -p "$BENCH_LOGS"; '
# What operators of training jobs write into each pod: rank, size and where rank 0 is. The pods find it on the shared storage.
JOIN = (
    "export RANK=$JOB_COMPLETION_INDEX LOCAL_RANK=0; at=/data/$JOB/master-$ATTEMPT; "
    '[ "$RANK" != 0 ] || { echo "$POD_IP" > $at.new; mv $at.new $at; }; '
    "until [ -e $at ]; do sleep 0.05; done; export MASTER_ADDR=$(cat $at); "
)


class TooLate(Failed):
    """An event was not made to happen, because its moment had gone. The job is as it was."""


def shared_folder(cluster: Cluster, job: str, script: Path) -> Path:
    """Make the folder that the job's pods see as /data/<job>, with the script in it."""
    claim = json.loads(cluster.kubectl("get", "pvc", "training-data", "-o", "json"))
    volume: str = claim["spec"]["volumeName"]
    folder = cluster.shared / volume / job
    folder.mkdir(parents=True)
    shutil.copy(script, folder / script.name)
    return folder


class ElasticJob:
    """A job of the operator, whose workers keep their processes (MEMORY) or start again from a checkpoint (PROCESS)."""

    def __init__(self, cluster: Cluster, side: str, name: str, add: Add) -> None:
        self._cluster = cluster
        self._script = SCRIPTS[side]
        self._add = add
        self.run = JobRun(cluster, name)
        self.worlds = Worlds(shared_folder(cluster, name, self._script) / "logs")

    def start(self) -> None:
        """Start with 4 replicas."""
        name, since = self.run.name, time.monotonic()
        env = {"JOB": name, "BENCH_FOLDER": f"/data/{name}", "OMP_NUM_THREADS": "1"}
        self.run.apply(
            start=4, cpu=CPU, command=["sh", "-c", f"{OWN_LOGS} exec hyperpodrun /data/$JOB/{self._script.name}"],
            container={"env": [{"name": key, "value": value} for key, value in env.items()]},
        )  # fmt: skip
        self._add("start 4", steplog.first_step_everywhere(self.worlds.wait_for(4, since)) - since)
        self.run.be_quick()
        self.worlds.train()

    def resize(self, name: str, size: int) -> None:
        """Have a user scale the job."""
        old, since = self.worlds.present, time.monotonic()
        self.run.scale(size)
        new = self.worlds.wait_for(size, since)
        self.worlds.train()
        found = steplog.restart(self.worlds.again(old), new)
        self._add(name, found.gap_s)
        self._add(f"repeated, {name}", found.repeated)
        self._add(f"{name}, whole", found.first_new - since)

    def crash(self) -> None:
        """Kill a worker."""
        self._kill(CRASH, 3)

    def crash_early(self) -> None:
        """Kill another one right after all of them train again. Raises TooLate when the chance has gone; the job trains then."""
        began = max(worker.began for worker in self.worlds.present)
        if (age_s := time.monotonic() - began) > EARLY_S:
            self.worlds.train()
            raise TooLate(f"the crash was to be within {EARLY_S:g} s of a start; after {age_s:.1f} s it is too late")
        self._kill(EARLY_CRASH, 2)
        self.worlds.train()

    def lose_node(self) -> None:
        """Cut the power of a node that trains, and on which the leader does not run; afterwards it is switched on again."""
        before, node = self.run.history()[-1]["generation"], one_of_its_nodes(self.run, self._cluster)
        killed_at, killed_unix = time.monotonic(), time.time()
        self._cluster.kill_node(node)
        try:
            self._add("node loss seen", detected_at(recovery_after(self.run, before)) - killed_unix)
            new = self.worlds.wait_for(2, killed_at)
            self._add("node loss back", steplog.first_step_everywhere(new) - killed_at)
        finally:
            self._cluster.return_node(node)

    def end(self) -> None:
        """Delete the job and wait until its pods are gone."""
        self.run.delete()

    def _kill(self, name: str, rank: int) -> None:
        """Kill the worker of a rank. Its crash counts until the slowest rank has made a step."""
        killed_at = self.worlds.kill(rank)
        new = self.worlds.wait_for(4, killed_at)
        self._add(f"{name} back", steplog.first_step_everywhere(new) - killed_at)
        self._add(f"{name}, warm workers", sum(worker.is_warm for worker in new))


class BatchJob:
    """A Job of Kubernetes that is restarted as JobSet does it: deleted with its pods, and created again as the next attempt."""

    def __init__(self, cluster: Cluster, name: str, add: Add) -> None:
        self._cluster = cluster
        self._name = name
        self._add = add
        self._attempt = 0
        self.worlds = Worlds(shared_folder(cluster, name, SCRIPT) / "logs")

    @property
    def _object(self) -> str:
        return f"{self._name}-{self._attempt}"

    def start(self) -> None:
        """Start with 4 pods."""
        since = time.monotonic()
        self._create(4)
        self._add("start 4", steplog.first_step_everywhere(self.worlds.wait_for(4, since)) - since)
        self.worlds.train()

    def resize(self, name: str, size: int) -> None:
        """Restart with another number of pods."""
        old, since = self.worlds.present, time.monotonic()
        self._restart(size)
        new = self.worlds.wait_for(size, since)
        self.worlds.train()
        found = steplog.restart(self.worlds.again(old), new)
        self._add(name, found.gap_s)
        self._add(f"repeated, {name}", found.repeated)
        self._add(f"{name}, whole", found.first_new - since)

    def crash(self) -> None:
        """Kill a worker; as soon as the Job has failed, it is restarted."""
        self._kill(CRASH, 3)

    def crash_early(self) -> None:
        """Kill another one soon after that start."""
        self._kill(EARLY_CRASH, 2)

    def end(self) -> None:
        """Delete the Job and wait until its pods are gone."""
        self._delete()

    def _kill(self, name: str, rank: int) -> None:
        killed_at = self.worlds.kill(rank)
        until(self._has_failed, f"{self._object} to fail", END_WITHIN_S, every_s=0.05)
        self._restart(4)
        new = self.worlds.wait_for(4, killed_at)
        self._add(f"{name} back", steplog.first_step_everywhere(new) - killed_at)

    def _restart(self, size: int) -> None:
        self._delete()
        self._attempt += 1
        self._create(size)

    def _delete(self) -> None:
        if self._call("DELETE", f"{JOBS}/{self._object}?propagationPolicy=Foreground"):
            until(lambda: not self._call("GET", f"{JOBS}/{self._object}"), f"{self._object} to go", END_WITHIN_S, 0.05)

    def _has_failed(self) -> bool:
        conditions = self._get(f"{JOBS}/{self._object}")["status"].get("conditions", ())
        return any(each["type"] == "Failed" and each["status"] == "True" for each in conditions)

    def _create(self, size: int) -> None:
        self._call("POST", JOBS, batch_job(self._name, self._attempt, size))

    def _get(self, path: str) -> dict[str, Any]:
        if found := self._call("GET", path):
            return found
        raise Failed(f"{path} is not there")

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        async def call() -> dict[str, Any]:
            async with ApiClient(self._cluster.kubeconfig, parallel=1) as api:
                return await api.call(method, path, body, fine=(404,))

        return asyncio.run(call())


def batch_job(name: str, attempt: int, size: int) -> dict[str, Any]:
    """Give one attempt of the Job: so many pods that fail together, with the resources of an elastic job's replicas."""
    env: list[dict[str, Any]] = [
        {"name": key, "value": value}
        for key, value in {
            "JOB": name, "ATTEMPT": str(attempt), "WORLD_SIZE": str(size), "MASTER_PORT": str(MASTER_PORT),
            "BENCH_FOLDER": f"/data/{name}", "OMP_NUM_THREADS": "1",
        }.items()
    ]  # fmt: skip
    env.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    container = {
        "name": "trainer", "image": IMAGE, "imagePullPolicy": "IfNotPresent", "env": env,
        "command": ["sh", "-c", f"{OWN_LOGS}{JOIN} exec python /data/$JOB/{SCRIPT.name}"],
        "resources": {"requests": {"cpu": CPU, "memory": "256Mi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }  # fmt: skip
    volume = {"name": "data", "persistentVolumeClaim": {"claimName": "training-data"}}
    # Python as a container's first process does not end on SIGTERM: the usual 30 s would be all that is measured.
    spec = {
        "restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container], "volumes": [volume]
    }  # fmt: skip
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"{name}-{attempt}", "namespace": "default"},
        "spec": {
            "completionMode": "Indexed", "completions": size, "parallelism": size, "backoffLimit": 0,
            "template": {"spec": spec},
        },
    }  # fmt: skip
