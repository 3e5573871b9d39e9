"""The lives of all jobs in compat/ at once: applied as they are, trained, resized once where elastic, and completed.

One operator process, one control plane, played nodes. What was seen on the way is kept for the tests to judge.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.api.compat_jobs import EXPECTED, FOLDER, name_of, namespace_of
from tests.api.compat_nodes import PlayedNodes
from tests.api.compat_queues import compat_queues, set_apart
from tests.api.jobs import job
from tests.api.restarted_operator import RestartedOperator
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster

NAMESPACES = ("default", "compat-spread", "compat-states")
NODES = {"ml.p5.48xlarge": 158, "ml.g6e.12xlarge": 6, "ml.trn1.32xlarge": 2}
MANNERS = {"deaf-trainer": "deaf", "mute": "mute", "faulted": "faulty", "failed": "faulty"}
# In no manifest: jobs that stay in the states through which a good life only passes.
STATES = {
    "waiting": "Created", "suspended": "Suspended", "mute": "PodsRunning", "faulted": "Faulted", "failed": "Failed"
}  # fmt: skip
OPERATOR = ("-m", "elastipod.cli", "operator")
SOON_S = 20.0


class Patience:
    """How long each phase of the lives may take. It ends as soon as all jobs are there.

    After one that ran into its end, the others are short: all of them must end within the time of a test, so that the tests can say
    what was missing.
    """

    def __init__(self) -> None:
        self._limit_s = PATIENCE_S

    def wait_until(self, is_there: Callable[[], bool]) -> None:
        """Return when it is there, or at the end of the phase's time."""
        end = time.monotonic() + self._limit_s
        while not is_there():
            if time.monotonic() > end:
                self._limit_s = SOON_S
                return
            time.sleep(0.5)


@dataclass
class Lives:
    """What was seen. Objects are by job name; a job that did not come as far as a phase is missing there."""

    applied: list[str] = field(default_factory=list)
    """What kubectl said."""
    running: dict[str, dict[str, Any]] = field(default_factory=dict)
    shrunk: dict[str, dict[str, Any]] = field(default_factory=dict)
    grown: dict[str, dict[str, Any]] = field(default_factory=dict)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Every pod as it came to its node, by name."""
    starts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Every /start that an agent acted on, by pod."""
    left: list[tuple[str, str]] = field(default_factory=list)
    """Jobs and pods that are there after the end."""
    events: list[dict[str, Any]] = field(default_factory=list)
    written: list[dict[str, Any]] = field(default_factory=list)
    """All jobs at the end, with who wrote which of their fields."""
    took_s: dict[str, float] = field(default_factory=dict)
    patience: Patience = field(default_factory=Patience)
    operator_log: str = ""

    def generations(self, job_name: str) -> dict[int, dict[str, dict[str, Any]]]:
        """Give the /start calls of a job by generation and pod."""
        found: dict[int, dict[str, dict[str, Any]]] = {}
        for pod, bodies in self.starts.items():
            if self.pods[pod]["metadata"]["labels"]["HPJob"] == job_name:
                for body in bodies:
                    found.setdefault(body["generation"], {})[pod] = body
        return found


def live(
    cluster: Cluster, folder: Path, while_all_train: Callable[[Patience], None], between: Callable[[Patience], None]
) -> Lives:
    """Let all jobs live.

    while_all_train() is called before the first of them completes, between() when the last state of all is reached and
    everything is there yet.
    """
    lives = Lives()
    prepare(cluster)
    with (
        PlayedNodes(cluster.kubeconfig, NODES, MANNERS) as nodes,
        operator(cluster, folder) as log,
    ):
        set_apart(cluster, [f"p5-{number}" for number in range(8)])
        for namespace in NAMESPACES[:2]:
            paths = [f"--filename={FOLDER / m}.yaml" for m in EXPECTED if namespace_of(m) == namespace]
            lives.applied += cluster.kubectl(
                "-n", namespace, "apply", "--validate=strict", *paths, check=False
            ).splitlines()
        _apply_states(cluster)
        with _timed(lives, "running"):
            _collect(lives, cluster, lives.running, _trains)
        elastic = {name_of(m) for m, e in EXPECTED.items() if len(e.sizes) > 1}
        lowest = {name_of(m): e.sizes[0] for m, e in EXPECTED.items() if len(e.sizes) > 1}
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: _be_quick(cluster, name, lowest[name]), elastic & lives.running.keys()))
        with _timed(lives, "shrunk"):
            _collect(lives, cluster, lives.shrunk, lambda b: _trains_at(b, lowest[_name(b)]), set(lowest))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: _patch(cluster, name, {"replicas": 0}), lowest))
        with _timed(lives, "grown"):
            largest = {name_of(m): e.sizes[-1] for m, e in EXPECTED.items()}
            _collect(lives, cluster, lives.grown, lambda b: _trains_at(b, largest[_name(b)]), elastic)
        while_all_train(lives.patience)
        nodes.complete({name_of(m) for m in EXPECTED})
        with _timed(lives, "ended"):
            _collect(lives, cluster, lives.ended, lambda b: _state(b) in ("Completed", "Failed"))
        with _timed(lives, "states"):
            _collect(
                lives, cluster, lives.states, lambda b: _state(b) == STATES[_name(b)], set(STATES), "compat-states"
            )
        lives.left = _left_when_cleaned(cluster, lives.patience)
        lives.events = list_objects(cluster, "events")
        lives.written = list_objects(cluster, "hyperpodpytorchjobs")
        between(lives.patience)
        lives.pods, lives.starts = dict(nodes.seen), dict(nodes.starts)
    lives.operator_log = log.read_text(encoding="utf-8")
    return lives


def _left_when_cleaned(cluster: Cluster, patience: Patience) -> list[tuple[str, str]]:
    """Give the jobs and names of the pods that stay, once those that are to be cleaned are on their way out."""
    cleaned = {name_of(m) for m, e in EXPECTED.items() if not e.keeps_pods}
    left: list[tuple[str, str]] = []

    def are_cleaned() -> bool:
        listed = list_objects(cluster, "pods")
        here = [p["metadata"] for p in listed if "deletionTimestamp" not in p["metadata"]]
        left[:] = [(m["labels"]["HPJob"], m["name"]) for m in here if m["namespace"] in NAMESPACES]
        return not any(job_name in cleaned for job_name, _ in left)

    patience.wait_until(are_cleaned)
    return left


def prepare(cluster: Cluster) -> None:
    """Make what the manifests take for granted: namespaces, classes, queues and the claim of the shared file system."""
    bodies: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in NAMESPACES[1:]
    ]
    for name, value in (("high-priority", 1000), ("low-priority", 10)):
        # The fleet is nearly full, and what the scheduler takes from other jobs is another test's matter.
        bodies.append({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name},
            "value": value, "preemptionPolicy": "Never",
        })  # fmt: skip
    size = {"storage": "1200Gi"}
    for namespace in NAMESPACES[:2]:
        volume = f"fsx-{namespace}"
        bodies.append({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": volume},
            "spec": {"capacity": size, "accessModes": ["ReadWriteMany"], "hostPath": {"path": "/fsx"},
                     "claimRef": {"namespace": namespace, "name": "fsx-claim"}},
        })  # fmt: skip
        bodies.append({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "fsx-claim", "namespace": namespace},
            "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": volume,
                     "resources": {"requests": size}},
        })  # fmt: skip
    bodies += compat_queues(NAMESPACES[0])
    cluster.kubectl("apply", "-f", "-", input=json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies}))
    for namespace in NAMESPACES[:2]:  # the scheduler is slow to look again at pods whose claim was not bound yet
        cluster.kubectl(
            "-n", namespace, "wait", "pvc/fsx-claim", "--for=jsonpath={.status.phase}=Bound", "--timeout=240s"
        )


@contextmanager
def operator(
    cluster: Cluster,
    folder: Path,
    namespaces: Sequence[str] = NAMESPACES,
    more: Mapping[str, str] | None = None,
    program: Sequence[str] = OPERATOR,
) -> Iterator[Path]:
    """Run the operator beside the cluster, with an install key; gives its log.

    namespaces: empty for all. more: further variables of its environment, which win. program: what Python runs.
    """
    key, log = folder / "install-key", folder / "operator.log"
    key.write_text("0123456789abcdef" * 4 + "\n", encoding="utf-8")
    environ = {**os.environ, **cluster.environment(), "WATCH_NAMESPACES": ",".join(namespaces), "METRICS_PORT": "0"}
    environ |= {"ELASTIPOD_INSTALL_KEY_FILE": str(key), **(more or {})}
    with RestartedOperator([sys.executable, *program], environ, log) as running:
        yield log
        assert running.is_alive, f"the operator ended by itself: {log.read_text()[-3000:]}"


def _apply_states(cluster: Cluster) -> None:
    nowhere = {"nodeSelector": {"node.kubernetes.io/instance-type": "ml.none"}}
    specs: dict[str, dict[str, Any]] = {
        "waiting": {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4}},
        "suspended": {"runPolicy": {"suspend": True}},
        "mute": {},
        "faulted": {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 4}},
        "failed": {"runPolicy": {"jobMaxRetryCount": 0, "ttlSecondsAfterFinished": 600}},
    }
    bodies = []
    for name, spec in specs.items():
        body = job(name, **spec)
        container = {"name": "trainer", "image": "train:1", "command": ["hyperpodrun", "train.py"]}
        pod: dict[str, Any] = {"containers": [container], **(nowhere if name == "waiting" else {})}
        body["spec"]["replicaSpecs"][0]["template"] = {"spec": pod}
        bodies.append(body)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
    cluster.kubectl("-n", "compat-states", "apply", "-f", "-", input=text)


def _be_quick(cluster: Cluster, name: str, ceiling: int) -> None:
    """What a user edits who does not want to wait: no waiting for further replicas, and one second for a checkpoint."""
    quick = {"scalingTimeoutInSeconds": 0, "gracefulShutdownTimeoutInSeconds": 1}
    _patch(cluster, name, {"elasticPolicy": quick, "elastipod": {"minStableSeconds": 0}, "replicas": ceiling})


def _patch(cluster: Cluster, name: str, spec: dict[str, Any]) -> None:
    cluster.kubectl("patch", "hpjob", name, "--type=merge", "-p", json.dumps({"spec": spec}))


def _collect(
    lives: Lives,
    cluster: Cluster,
    into: dict[str, dict[str, Any]],
    holds: Callable[[dict[str, Any]], bool],
    names: set[str] | None = None,
    *namespaces: str,
) -> None:
    """Keep each job as it was when something first held of it; a job of which it never does is left out."""
    wanted = names if names is not None else {name_of(m) for m in EXPECTED}

    def have_all() -> bool:
        for namespace in namespaces or NAMESPACES[:2]:
            for body in list_objects(cluster, "hyperpodpytorchjobs", namespace):
                if _name(body) in wanted - into.keys() and holds(body):
                    into[_name(body)] = body
        return wanted <= into.keys()

    lives.patience.wait_until(have_all)


@contextmanager
def _timed(lives: Lives, phase: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    lives.took_s[phase] = round(time.monotonic() - began, 1)


def _name(body: dict[str, Any]) -> str:
    return str(body["metadata"]["name"])


def last_condition(body: dict[str, Any]) -> dict[str, Any]:
    """Give the last condition, which is the state."""
    conditions: list[dict[str, Any]] = (body.get("status") or {}).get("conditions") or [{}]
    return conditions[-1]


def _state(body: dict[str, Any]) -> str:
    return str(last_condition(body).get("type", ""))


def size_of(body: dict[str, Any]) -> int:
    """Give the size at which a job trains."""
    return int(body["metadata"].get("annotations", {}).get("elastipod.io/size", "0").split("/")[0])


def _trains(body: dict[str, Any]) -> bool:
    return _state(body) == "Running" and last_condition(body)["reason"] == "Training" and size_of(body) > 0


def _trains_at(body: dict[str, Any], size: int) -> bool:
    return _trains(body) and size_of(body) == size
