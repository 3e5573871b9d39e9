"""Drives one real job on the local cluster and reads what users, tools and the operator's annotations show of it."""

from __future__ import annotations

import base64
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.agent_client import ask_agent
from tests.objects import get_object, list_objects, look
from tests.patience import PATIENCE_S

from elastipod_agent.authentication import Credentials
from elastipod_local.cluster import Cluster

T = TypeVar("T")
AGENT_PORT = 8080
ANSWER_S = 5.0  # for an API server before it is asked again
SLOW_S = 20.0  # for an answer that may not come at all: it is asked for again then
JOBS_PATH = "/apis/sagemaker.amazonaws.com/v1/namespaces/default/hyperpodpytorchjobs"
PODS_PATH = "/api/v1/namespaces/default/pods"
# Small enough that four workers on two cores make several steps a second.
TINY_MODEL = ("--dim=32", "--layers=1", "--heads=2", "--corpus-kib=1024", "--global-batch=16", "--micro-batch=4")


@dataclass
class JobRun:
    """A job by name in namespace default. Every wait has a deadline and says what was seen last."""

    cluster: Cluster
    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    # -- make and change

    def apply(
        self,
        *script_arguments: str,
        minimum: int = 2,
        maximum: int = 4,
        step: int = 2,
        start: int | None = None,
        command: list[str] | None = None,
        image: str = "docker.io/elastipod/train:dev",
        container: dict[str, Any] | None = None,
        pod: dict[str, Any] | None = None,
        beside: Sequence[dict[str, Any]] = (),
        cpu: str = "600m",
        script: str = "train_with_checkpoints.py",
        **spec: Any,
    ) -> str:
        """Apply the job; its workers train the example language model with a tiny model unless `command` says otherwise.

        script: of examples/lm; with train.py workers keep their processes.

        start: replicas that it waits for to begin; the minimum unless named, and more join as they become ready. beside:
        further containers of its pods.
        """
        body = {
            **self.container(*script_arguments, script=script, image=image, cpu=cpu),
            **({"command": command} if command else {}),
            **(container or {}),
        }
        volume = {"name": "data", "persistentVolumeClaim": {"claimName": "training-data"}}
        template = {"spec": {"containers": [body, *beside], "volumes": [volume], **(pod or {})}}
        self.spec = {
            "nprocPerNode": "1",
            "elasticPolicy": {
                "minReplicas": minimum,
                "maxReplicas": maximum,
                "replicaIncrementStep": step,
                "scalingTimeoutInSeconds": 60 if start else 1,
                "gracefulShutdownTimeoutInSeconds": 240,
                "faultyScaleDownTimeoutInSeconds": 5,
            },
            "elastipod": {"minStableSeconds": 1},
            "replicaSpecs": [
                {"name": "worker", "replicas": start or minimum, "maxReplicas": maximum, "template": template}
            ],
            **spec,
        }
        return self.apply_again()

    def container(
        self,
        *script_arguments: str,
        script: str,
        image: str = "docker.io/elastipod/train:dev",
        cpu: str = "600m",
    ) -> dict[str, Any]:
        """Give a container that trains the tiny model with a script of examples/lm."""
        data = f"/data/{self.name}"
        train = ["hyperpodrun", f"/opt/elastipod/examples/lm/{script}", *TINY_MODEL]
        train += [f"--checkpoint-dir={data}/checkpoints", f"--sample-log-dir={data}/samples", *script_arguments]
        return {
            "name": "trainer",
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            "command": train,
            "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            "resources": {"requests": {"cpu": cpu, "memory": "256Mi"}},
            "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        }

    def apply_again(self) -> str:
        """Apply the same manifest; gives kubectl's line."""
        # The server drops empty labels, and the next apply would differ.
        labels = {"labels": self.labels} if self.labels else {}
        manifest = {
            "apiVersion": "sagemaker.amazonaws.com/v1",
            "kind": "HyperPodPyTorchJob",
            "metadata": {"name": self.name, "namespace": "default", **labels},
            "spec": self.spec,
        }
        return self.cluster.kubectl("apply", "-f", "-", input=json.dumps(manifest))

    def scale(self, replicas: int) -> None:
        """What a user types to shrink or grow."""
        self.cluster.kubectl("scale", f"hyperpodjob/{self.name}", f"--replicas={replicas}")

    def be_quick(self) -> None:
        """What a user edits who does not want a growth to wait for further replicas."""
        quick = {"spec": {"elasticPolicy": {"scalingTimeoutInSeconds": 1}}}
        self.cluster.kubectl("patch", "hpjob", self.name, "--type=merge", "-p", json.dumps(quick))

    def delete(self, *, wait: bool = True) -> None:
        """Delete the job and, unless told otherwise, wait until its pods are gone."""
        how = ("--wait=true", "--timeout=240s") if wait else ("--wait=false",)
        self.cluster.kubectl("delete", "hpjob", self.name, "--ignore-not-found", *how)

    # -- look

    def body(self) -> dict[str, Any]:
        """The object as the API server has it. Raises ConnectionError while it has none, or does not answer."""
        return self._get(f"{JOBS_PATH}/{self.name}")

    def _get(self, path: str) -> dict[str, Any]:
        """Look without a process for each look: waits look several times a second. A slow API server is asked again."""
        deadline = time.monotonic() + SLOW_S
        while (found := self._look(path)) is None:
            if time.monotonic() > deadline:
                raise ConnectionError(f"the API server gave nothing for {path}")
            time.sleep(0.2)
        return found

    def _look(self, path: str) -> dict[str, Any] | None:
        try:
            return look(self.cluster, path, ANSWER_S)
        except (OSError, RuntimeError, http.client.HTTPException):
            return None  # the server does not answer at the moment

    def state(self) -> str:
        """The last condition's type, which is the state."""
        conditions = self.body().get("status", {}).get("conditions") or [{}]
        return str(conditions[-1].get("type", ""))

    def condition(self, kind: str) -> dict[str, Any]:
        """One condition; empty when there is none of that type."""
        conditions: list[dict[str, Any]] = self.body().get("status", {}).get("conditions") or []
        return next((c for c in conditions if c["type"] == kind), {})

    def told(self, kind: str, reason: str) -> str:
        """The message of a condition once it has this reason; empty before."""
        condition = self.condition(kind)
        return str(condition["message"]) if condition.get("reason") == reason else ""

    def size(self) -> int:
        """Replicas that train now, from the annotation behind the Size column."""
        text = self.body()["metadata"].get("annotations", {}).get("elastipod.io/size", "0/0/0")
        return int(text.split("/")[0])

    def history(self) -> list[dict[str, Any]]:
        """Every start of the workers, newest last."""
        text = self.body()["metadata"].get("annotations", {}).get("elastipod.io/history", "[]")
        entries: list[dict[str, Any]] = json.loads(text)
        return entries

    def pods(self) -> list[dict[str, Any]]:
        """The job's pods."""
        pods: list[dict[str, Any]] = self._get(f"{PODS_PATH}?labelSelector=HPJob%3D{self.name}")["items"]
        return pods

    def running_pods(self) -> list[dict[str, Any]]:
        """Those of them that run."""
        return [
            p for p in self.pods() if p["status"]["phase"] == "Running" and "deletionTimestamp" not in p["metadata"]
        ]

    def agent(self, pod: dict[str, Any]) -> dict[str, Any]:
        """What the agent of a pod answers on /status to a caller with the job's key."""
        code, text = ask_agent(f"http://{pod['status']['podIP']}:{AGENT_PORT}", self.credentials(pod), timeout_s=SLOW_S)
        if code != 200:
            raise OSError(f"the agent answers HTTP {code}")
        status: dict[str, Any] = json.loads(text)
        return status

    def credentials(self, pod: dict[str, Any]) -> Credentials:
        """The key that a pod was given, from the Secret to which it refers; empty for none."""
        env = pod["spec"]["containers"][0].get("env", ())
        name = next((e["valueFrom"]["secretKeyRef"]["name"] for e in env if e["name"] == "ELASTIPOD_KEY"), "")
        if name and name not in self.keys:
            secret = get_object(self.cluster, "secrets", name, "default")
            self.keys[name] = base64.b64decode(secret["data"]["key"]).decode()
        return Credentials(key=self.keys.get(name, ""), pod=pod["metadata"]["name"])

    def generations(self) -> set[int]:
        """The generations that the agents say they run."""

        def told() -> tuple[set[int]]:
            return ({a["generation"] for p in self.running_pods() if (a := self.agent(p))["status"] == "running"},)

        return self.until("answers of the agents", told)[0]  # a pod may go while it is asked

    def step(self) -> int:
        """The newest step that an agent knows; 0 before the first."""

        def told() -> tuple[int]:
            return (max((self.agent(p).get("worker", {}).get("step") or 0 for p in self.running_pods()), default=0),)

        return self.until("answers of the agents", told)[0]  # a pod may go while it is asked

    def samples(self) -> Path:
        """The sample logs on this machine."""
        return next(iter(self.cluster.shared.glob(f"*/{self.name}/samples")))

    def audit(self) -> dict[str, Any]:
        """What `elastipod audit --json` says, run in this machine's environment."""
        command = [sys.executable, "-m", "elastipod.cli", "audit", str(self.samples()), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        verdict: dict[str, Any] = json.loads(done.stdout)
        return {**verdict, "exit_code": done.returncode}

    # -- wait

    def until(self, what: str, check: Callable[[], T], within_s: float = PATIENCE_S, every_s: float = 0.3) -> T:
        """Wait until check() gives something true; fails with what was seen last, the conditions and the operator's log."""
        deadline = time.monotonic() + within_s
        last: object = None
        while time.monotonic() < deadline:
            try:
                last = value = check()
            except (OSError, StopIteration) as error:  # an agent that is not there yet, a log not yet written
                last = error
            else:
                if value:
                    return value
            time.sleep(every_s)
        raise AssertionError(f"waited {within_s:g} s for {what}; last seen: {last!r}\n{self.story()}")

    def until_draining(self, pods: list[dict[str, Any]]) -> None:
        """Wait until one of these pods' workers are asked to leave, or have just left: it takes no second."""

        def runs(pod: dict[str, Any]) -> bool:
            try:
                return bool(self.agent(pod)["status"] == "running")
            except OSError as error:  # who is only slow to answer has not left
                return isinstance(getattr(error, "reason", error), TimeoutError)

        self.until("the drain", lambda: not all(map(runs, pods)), every_s=0.02)

    def events(self) -> dict[str, str]:
        """The messages of the job's Events by their reasons."""
        where = f"involvedObject.name%3D{self.name}"
        found = list_objects(self.cluster, "events", "default", fieldSelector=where)
        return {event["reason"]: event["message"] for event in found}

    def until_event(self, reason: str, words: str) -> None:
        """Wait for an Event with these words: it is written beside the state that it tells of."""
        self.until(f"Event {reason}: {words}", lambda: words in self.events().get(reason, ""))

    def until_training(self, size: int, beyond_step: int = 0) -> None:
        """Wait until that many replicas train and made a step."""
        self.until(f"{size} replicas", lambda: self.size() == size)
        self.until(f"a step beyond {beyond_step}", lambda: self.step() > beyond_step)

    def story(self) -> str:
        """What kubectl describe and the operator's log tell, for failures."""
        described = self.cluster.kubectl("describe", "hpjob", self.name, check=False)
        pods = self.cluster.kubectl("get", "pods", "-A", "-o", "wide", check=False)
        log = self.cluster.kubectl("-n", "aws-hyperpod", "logs", "deploy/elastipod", "--tail=40", check=False)
        workers = self.cluster.kubectl("logs", "-l", f"HPJob={self.name}", "--tail=10", "--prefix", check=False)
        return "\n".join((described[described.find("Status:") :], pods, log, workers))
