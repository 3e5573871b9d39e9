"""Our jobs and Kueue's own, batch/Job, pods and groups of pods, in one queue: each makes room for the other, and nobody touches
what is another's."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.compat_lives import operator
from tests.api.etcd_history import Change, Client, Recorder
from tests.api.kueue_objects import API, apply, let_a_second_pass, queues
from tests.api.neighbours import (
    BATCH_JOB,
    SharedNodes,
    is_ours,
    parallel_job,
    plain_pod,
    pod_group,
    shared_paths,
    trespasses,
)
from tests.api.queue_jobs import FLAVOR_LABELS, KIND, Team
from tests.api.quota_checker import EXTRA_BEFORE_BASE, JOB, POD, WORKLOAD, check
from tests.api.quota_objects import holds_quota, lives
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until

CPUS = 4
CLASSES = {"important": 1000, "urgent": 2000}


class Shared:
    """A queue, called default, in which everybody is. What is waited for is read from the history as it is recorded."""

    def __init__(self, cluster: Cluster, namespace: str, nodes: SharedNodes, recorder: Recorder, log: Path) -> None:
        self.team = Team(cluster, namespace)
        self.nodes = nodes
        self.recorder = recorder
        self.log = log
        self._cluster = cluster
        self._namespace = namespace

    def hand_in(self, *bodies: dict[str, Any]) -> None:
        apply(self._cluster, *bodies)

    def ours(self, name: str, priority: str = "", **spec: Any) -> None:
        """Hand in a job of ours. It names no queue: the one called default is everybody's."""
        labels = {"kueue.x-k8s.io/priority-class": priority} if priority else {}
        self.team.submit(name, queue="", labels=labels, **spec)

    def trains(self, name: str, size: int) -> None:
        self.until(
            lambda: self._state(name) == ("Running", "Training") and self._size(name) == size, f"{name} at {size}"
        )

    def is_held(self, name: str) -> None:
        self.until(lambda: self._state(name)[0] == "Suspended" and not self.pods(name), f"{name} to be held")

    def is_completed(self, name: str) -> None:
        self.until(lambda: self._state(name)[0] == "Completed", f"{name} to be completed")

    def run(self, prefix: str, count: int) -> None:
        """Wait until so many pods of this name run, and no others live."""

        def do() -> bool:
            living = [body for body in self.pods(prefix).values() if lives(body)]
            return [body["status"]["phase"] for body in living] == ["Running"] * count

        self.until(do, f"{count} pods of {prefix} to run")

    def pods(self, prefix: str) -> dict[str, Any]:
        return {name: body for name, body in self.recorder.now(POD).items() if name.startswith(f"{prefix}-")}

    def has_ended(self, job: str) -> bool:
        conditions = self.recorder.now(BATCH_JOB)[job].get("status", {}).get("conditions", ())
        return any(one["type"] == "Complete" and one["status"] == "True" for one in conditions)

    def is_quiet(self) -> bool:
        """Whether nobody holds quota any more and no pod lives."""
        workloads, pods = self.recorder.now(WORKLOAD).values(), self.recorder.now(POD).values()
        return not any(map(holds_quota, workloads)) and not any(map(lives, pods))

    def until(self, holds: Callable[[], bool], what: str) -> None:
        try:
            wait_until(holds, deadline_s=PATIENCE_S, what=what, every_s=0.05)
        except Exception as error:
            raise AssertionError(f"{error}: {self._told()}") from error

    def deleted_by_the_operator(self) -> set[str]:
        """Give the UIDs of what the operator says it has sent away."""
        lines = [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines() if line.startswith("{")]
        gone = {line["pod"] for line in lines if line["message"] == "pod deleted"}
        history = self.recorder.complete()
        pods = {change.uid for change in history if change.kind == POD and change.body["metadata"]["name"] in gone}
        return pods | {line["uid"] for line in lines if line["message"] == "quota returned"}

    def _state(self, name: str) -> tuple[str, str]:
        last = (self._job(name).get("status", {}).get("conditions") or [{}])[-1]
        return last.get("type", ""), last.get("reason", "")

    def _size(self, name: str) -> int:
        return int(self._job(name)["metadata"].get("annotations", {}).get("elastipod.io/size", "0").split("/")[0])

    def _job(self, name: str) -> dict[str, Any]:
        return self.recorder.now(JOB).get(name, {"metadata": {}})

    def _told(self) -> str:
        found: dict[str, Any] = {}
        for kind in (JOB, WORKLOAD, POD, BATCH_JOB):
            found[kind] = {
                name: body.get("status", {}).get("conditions") for name, body in self.recorder.now(kind).items()
            }
        return json.dumps(found)


@pytest.fixture
def shared(fair_jobs_server: Cluster, tmp_path: Path) -> Iterator[Shared]:
    cluster, namespace = fair_jobs_server, "shared"
    cluster.kubectl("create", "namespace", namespace)
    flavor, queue, local = queues(
        "shared", namespace, cpu=str(CPUS), preemption={"withinClusterQueue": "LowerPriority"}
    )
    flavor["spec"] = {"nodeLabels": FLAVOR_LABELS}
    local["metadata"]["name"] = "default"
    classes = [
        {"apiVersion": API, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
        for name, value in CLASSES.items()
    ]
    apply(cluster, flavor, queue, local, *classes)
    client = Client(cluster)
    nodes = SharedNodes(cluster.kubeconfig, {KIND: 2}, {}, selector="")
    try:
        with (
            nodes,
            Recorder(client, shared_paths(namespace)) as recorder,
            operator(cluster, tmp_path, (namespace,)) as log,
        ):
            yield Shared(cluster, namespace, nodes, recorder, log)
    finally:
        client.close()


@pytest.mark.long("variants")
def test_neighbours_in_one_queue(shared: Shared) -> None:
    team = shared.team.namespace
    shared.ours("elastic")
    shared.trains("elastic", 4)

    # Theirs in need of room: first increments go, then the base.
    shared.hand_in(parallel_job("batch", team, "default", "important", 2))
    shared.run("batch", 2)
    shared.trains("elastic", 2)
    let_a_second_pass()
    shared.hand_in(*pod_group("group", team, "default", "important", 2))
    shared.run("group", 2)
    shared.is_held("elastic")

    # Ours in need of room: the group is the newer one. Its pods do not come back, others take their places.
    shared.ours("urgent", "urgent", elasticPolicy=None)
    shared.trains("urgent", 2)
    shared.run("group", 0)
    shared.run("batch", 2)
    shared.hand_in(*pod_group("group", team, "default", "important", 2, first=2))
    shared.nodes.complete({"urgent"})
    shared.is_completed("urgent")
    shared.run("group", 2)
    shared.is_held("elastic")
    shared.nodes.finish(["group-2", "group-3"])
    shared.trains("elastic", 2)

    shared.hand_in(plain_pod("lone-pod", team, "default", "important"))
    shared.run("lone", 1)
    shared.is_held("elastic")
    shared.ours("largest", "urgent", elasticPolicy=None, replicaSpecs=[{"name": "pods", "replicas": CPUS}])
    shared.trains("largest", CPUS)
    shared.run("lone", 0)
    shared.run("batch", 0)

    # And all of them come to their end.
    shared.nodes.complete({"largest"})
    shared.is_completed("largest")
    shared.run("batch", 2)
    shared.trains("elastic", 2)
    shared.nodes.finish(name for name, body in shared.pods("batch").items() if lives(body))
    shared.until(lambda: shared.has_ended("batch"), "the Job to be complete")
    shared.trains("elastic", 4)
    shared.nodes.complete({"elastic"})
    shared.is_completed("elastic")
    shared.until(shared.is_quiet, "all quota to be given back")

    history = shared.recorder.complete()
    assert not trespasses(history, shared.deleted_by_the_operator())
    hold(history)


def hold(history: list[Change]) -> None:
    """Both sides were there, made room for each other, and ours kept to its quota."""
    by_side = {(change.kind, is_ours(change)) for change in history}
    assert by_side >= {(POD, True), (POD, False), (WORKLOAD, True), (WORKLOAD, False), (JOB, True), (BATCH_JOB, False)}
    mine = [change for change in history if is_ours(change)]
    verdict = check(mine, {"shared": 1000 * CPUS}, 2.0)
    # Who preempts is often one of theirs, of which this history does not tell.
    assert verdict.rules_broken() <= {EXTRA_BEFORE_BASE}
    assert {(e.is_base, e.reason) for e in verdict.evictions} == {(True, "Preempted"), (False, "Preempted")}
