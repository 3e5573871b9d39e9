"""What growth makes an autoscaler buy: a small controller beside the real scheduler adds a node for every pod that finds none.

It buys sooner and more simply than the cluster autoscaler and Karpenter do: at once, one node for each pending pod, whatever the
pod asks for. kwok's and Karpenter's own rules would buy less, never more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.api.compat_lives import operator, size_of
from tests.api.compat_nodes import PlayedNodes
from tests.api.jobs import apply, get, job
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until

KIND = "ml.c5.4xlarge"
LOOK_EVERY_S = 0.3


@pytest.fixture(autouse=True)
def only_own_pods(api_server: Cluster) -> None:
    """No pod that waits since an earlier test takes a place on the nodes of these."""
    api_server.kubectl("delete", "pods", "--all", "--all-namespaces", "--force", "--grace-period=0")


class Autoscaler:
    """Adds a node for each pod of a namespace that the scheduler could not place, once for each pod."""

    def __init__(self, cluster: Cluster, namespace: str, nodes: PlayedNodes) -> None:
        self.bought: list[str] = []
        """The pods for which a node was added, by UID."""
        self.most_pending = 0
        self.looks = 0
        self._cluster, self._namespace, self._nodes = cluster, namespace, nodes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoscaler")

    @contextmanager
    def at_work(self) -> Iterator[Autoscaler]:
        """Let it work."""
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join(PATIENCE_S)
        assert self.looks, "it never looked"

    def looked_twice_more(self) -> None:
        """Wait until it has looked twice from now on."""
        goal = self.looks + 2
        wait_until(lambda: self.looks >= goal, deadline_s=PATIENCE_S, what="the autoscaler to look", every_s=0.2)

    def _run(self) -> None:
        before: set[str] = set()
        while not self._stop.wait(LOOK_EVERY_S):
            found = {pod["metadata"]["uid"]: pod for pod in pods(self._cluster, self._namespace)}
            pending = [uid for uid, pod in found.items() if is_unschedulable(pod)]
            self.most_pending = max(self.most_pending, len(pending))
            # While pods are made one after the other, a later one could take the node that was bought for an earlier one.
            are_all_there, before = found.keys() == before, set(found)
            for uid in pending:
                if are_all_there and uid not in self.bought:
                    self.bought.append(uid)
                    self._nodes.add_node(KIND)
            self.looks += 1


def pods(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    found = list_objects(cluster, "pods", namespace)
    return found


def is_unschedulable(pod: dict[str, Any]) -> bool:
    """Whether the scheduler found no node, as both autoscalers read it."""
    conditions = pod["status"].get("conditions") or []
    return any(c["type"] == "PodScheduled" and c.get("reason") == "Unschedulable" for c in conditions)


def elastic(growth: str) -> dict[str, Any]:
    """A job of two to eight replicas in increments of two, each of which fills a node."""
    container = {"name": "trainer", "image": "train:1", "resources": {"requests": {"cpu": "12"}}}
    spec = {"name": "pods", "replicas": 2, "maxReplicas": 8, "template": {"spec": {"containers": [container]}}}
    policy = {
        "minReplicas": 2, "maxReplicas": 8, "replicaIncrementStep": 2,
        "scalingTimeoutInSeconds": 0, "gracefulShutdownTimeoutInSeconds": 1,
    }  # fmt: skip
    return job(replica_specs=[spec], elasticPolicy=policy, elastipod={"minStableSeconds": 0, "growth": growth})


def scaling_of(body: dict[str, Any]) -> dict[str, Any]:
    conditions = (body.get("status") or {}).get("conditions") or []
    return next((c for c in conditions if c["type"] == "Scaling"), {})


def until_size(cluster: Cluster, namespace: str, size: int) -> None:
    wait_until(
        lambda: size_of(get(cluster, namespace)) == size,
        deadline_s=PATIENCE_S, what=f"the job to train with {size} replicas", every_s=0.5,
    )  # fmt: skip


@pytest.mark.slow
def test_spare_capacity_only_never_makes_an_autoscaler_add_a_node(
    api_server: Cluster, namespace: str, tmp_path: Path
) -> None:
    """The job takes the five nodes that are there in whole increments, and those that come for others."""
    with (
        PlayedNodes(api_server.kubeconfig, {KIND: 5}, {}) as nodes,
        operator(api_server, tmp_path, (namespace,)),
        Autoscaler(api_server, namespace, nodes).at_work() as autoscaler,
    ):
        apply(api_server, namespace, elastic("SpareCapacityOnly"))
        until_size(api_server, namespace, 4)
        wait_until(
            lambda: scaling_of(get(api_server, namespace)).get("reason") == "NoSpareCapacity",
            deadline_s=PATIENCE_S, what="the job to say that no node has room", every_s=0.5,
        )  # fmt: skip
        autoscaler.looked_twice_more()
        assert (len(pods(api_server, namespace)), autoscaler.bought) == (4, [])
        nodes.add_node(KIND)
        until_size(api_server, namespace, 6)
        autoscaler.looked_twice_more()
        assert (autoscaler.most_pending, autoscaler.bought) == (0, [])
        api_server.kubectl("-n", namespace, "delete", "hpjob", "llm", "--timeout=240s")


@pytest.mark.slow
def test_by_default_no_more_is_bought_than_the_next_increment_wants(
    api_server: Cluster, namespace: str, tmp_path: Path
) -> None:
    """Agents that never answer: what was bought for the first increment is of no use, so nothing more is requested."""
    with (
        PlayedNodes(api_server.kubeconfig, {KIND: 2}, {"llm": "mute"}) as nodes,
        operator(api_server, tmp_path, (namespace,)),
        Autoscaler(api_server, namespace, nodes).at_work() as autoscaler,
    ):
        apply(api_server, namespace, elastic("NextIncrement"))
        wait_until(
            lambda: sum(bool(pod["spec"].get("nodeName")) for pod in pods(api_server, namespace)) == 4,
            deadline_s=PATIENCE_S, what="four pods to have nodes", every_s=0.5,
        )  # fmt: skip
        autoscaler.looked_twice_more()
        assert (len(pods(api_server, namespace)), len(autoscaler.bought)) == (4, 2)
        api_server.kubectl("-n", namespace, "delete", "hpjob", "llm", "--timeout=240s")


@pytest.mark.long("variants")
def test_by_default_a_job_that_uses_what_is_bought_grows_increment_by_increment(
    api_server: Cluster, namespace: str, tmp_path: Path
) -> None:
    with (
        PlayedNodes(api_server.kubeconfig, {KIND: 2}, {}) as nodes,
        operator(api_server, tmp_path, (namespace,)),
        Autoscaler(api_server, namespace, nodes).at_work() as autoscaler,
    ):
        apply(api_server, namespace, elastic("NextIncrement"))
        until_size(api_server, namespace, 8)
        assert (len(autoscaler.bought), autoscaler.most_pending) == (6, 2)
        api_server.kubectl("-n", namespace, "delete", "hpjob", "llm", "--timeout=240s")
