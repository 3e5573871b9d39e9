"""A real Kueue that waits for pods (`waitForPodsReady`): it takes quota back from a job whose pods find no node, and from no other.

`make test-long NAME=pods-ready`. The simulator plays the same rule of Kueue in many more schedules.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.api.compat_lives import operator
from tests.api.compat_nodes import PlayedNodes
from tests.api.conftest import serve_jobs
from tests.api.jobs import get
from tests.api.kueue_objects import apply, queues
from tests.api.queue_jobs import FLAVOR_LABELS, KIND, Team, conditions
from tests.long_runs import LongRun

from elastipod_local.cluster import Cluster
from elastipod_local.kueue_config import KueueOptions

# Kueue's own values are minutes.
WAITS = {
    "timeout": "10s",
    "recoveryTimeout": "10s",
    "blockAdmission": False,
    "requeuingStrategy": {"timestamp": "Eviction", "backoffBaseSeconds": 1, "backoffMaxSeconds": 2},
}


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    """A namespace with quota for six pods, in a cluster of its own without nodes."""
    options = KueueOptions(settings={"waitForPodsReady": WAITS})
    with Cluster.up("api-pods-ready", nodes=0, run_dir=tmp_path / "cluster", kueue=options) as cluster:
        serve_jobs(cluster)
        cluster.kubectl("create", "namespace", "team")
        flavor, *others = queues("team", "team", cpu="6")
        flavor["spec"] = {"nodeLabels": FLAVOR_LABELS}
        apply(cluster, flavor, *others)
        with operator(cluster, tmp_path, ("team",)):
            yield Team(cluster, "team")


def evictions(workload: dict[str, Any]) -> int:
    """Give how often Kueue took a Workload's quota back because its pods were not ready."""
    found = workload.get("status", {}).get("schedulingStats", {}).get("evictions", ())
    return sum(one["count"] for one in found if one["reason"] == "PodsReadyTimeout")


def quota_of(team: Team, name: str) -> dict[int, tuple[str, int]]:
    """Give the Workloads of a job: UID, and how often each was evicted."""
    return {number: (body["metadata"]["uid"], evictions(body)) for number, body in team.workloads(name).items()}


def told(team: Team, name: str) -> str:
    """Give what the conditions of a job say."""
    found = get(team.cluster, team.namespace, name).get("status", {}).get("conditions") or ()
    return " ".join(str(one["message"]) for one in found)


@pytest.mark.timeout(600)
@pytest.mark.long("pods-ready")
def test_quota_is_taken_from_pods_without_a_node_and_from_no_others(team: Team, long_run: LongRun) -> None:
    team.submit("elastic")
    team.until(lambda: evictions(team.workloads("elastic").get(0, {})) > 0, "the base to be evicted", "elastic")
    team.until(
        lambda: "PodsReady timeout" in told(team, "elastic"), "the job to say why its quota was taken", "elastic"
    )

    with PlayedNodes(team.cluster.kubeconfig, {KIND: 4}, {}) as nodes:
        team.trains("elastic", 4)

        def all_ready() -> bool:
            return all(conditions(body).get("PodsReady") == "True" for body in team.workloads("elastic").values())

        team.until(all_ready, "Kueue to know that all pods are ready", "elastic")
        before = quota_of(team, "elastic")
        starts = {pod: len(bodies) for pod, bodies in nodes.starts.items()}
        assert before.keys() == {0, 1, 2}

        # Another one, for whose pods there is never a node, tells when the time of all that came before is over.
        nowhere = {"spec": {"nodeSelector": {"rack": "none"}}}
        team.submit("stuck", elasticPolicy=None, replicaSpecs=[{"name": "pods", "replicas": 2, "template": nowhere}])
        team.until(lambda: evictions(team.workloads("stuck").get(0, {})) > 1, "the other to be evicted twice", "stuck")
        assert quota_of(team, "elastic") == before
        assert {pod: len(bodies) for pod, bodies in nodes.starts.items()} == starts, "and nothing was started again"

        nodes.complete({"elastic"})
        team.until(lambda: team.state("elastic")["type"] == "Completed", "the job to end", "elastic")
    long_run.count(evictions_of_pods_without_a_node=evictions(team.workloads("stuck")[0]))
