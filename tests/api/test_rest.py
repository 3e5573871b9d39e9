"""An operator at rest: jobs train, nothing changes, and the API server hears of it only when the lease is renewed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from bench.operator_load.cluster import NAMESPACE, Call, LoadCluster, count_by_kind
from bench.operator_load.load import operator_command, operator_environment
from tests.api.compat_nodes import PlayedNodes, until
from tests.api.jobs import job
from tests.api.restarted_operator import RestartedOperator
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_operator.core.names import FIELD_MANAGER

JOBS, RENEWALS = 20, 4  # a renewal every two seconds
PLAYER = "Python"  # who plays the nodes


def training(cluster: LoadCluster) -> int:
    """Count the jobs that are said to train."""
    listed = list_objects(cluster, "hyperpodpytorchjobs", NAMESPACE)
    last = [((body.get("status") or {}).get("conditions") or [{}])[-1] for body in listed]
    return sum(condition.get("reason") == "Training" for condition in last)


def managers(cluster: LoadCluster, kind: str) -> set[str]:
    """Give who wrote objects of a kind, by the names that they gave."""
    return {
        entry["manager"]
        for body in list_objects(cluster, kind, NAMESPACE)
        for entry in body["metadata"]["managedFields"]
    }


def calls_at_rest(cluster: LoadCluster, operator: RestartedOperator) -> Counter[str] | None:
    """Count the calls of some renewals of the lease; None if the operator was started again meanwhile."""
    starts, there = operator.starts, len(cluster.calls())

    def is_at_rest() -> bool:
        # The last Event is written a moment after the last status. An operator that waits for the lease renews nothing.
        last = cluster.calls()[there:][-4:]
        return renewals(last) == 2 and all(call.resource == "leases" for call in last)

    until("rest", lambda: operator.starts != starts or is_at_rest(), PATIENCE_S)
    begin = len(cluster.calls())
    until(
        f"{RENEWALS} renewals of the lease",
        lambda: operator.starts != starts or renewals(cluster.calls()[begin:]) >= RENEWALS,
        PATIENCE_S,
    )
    return count_by_kind(cluster.calls()[begin:]) if operator.starts == starts else None


def renewals(calls: list[Call]) -> int:
    """Count renewals of the lease."""
    return count_by_kind(calls)["update leases"]


@pytest.mark.slow
def test_while_nothing_changes_no_call_is_made_but_for_the_lease(tmp_path: Path) -> None:
    log = tmp_path / "operator.log"
    with LoadCluster.up("rest", nodes=0, run_dir=tmp_path / "cluster") as made:
        assert isinstance(made, LoadCluster)
        kubeconfig = made.prepare()
        environ = operator_environment(kubeconfig, tmp_path)
        with (
            PlayedNodes(made.kubeconfig, {"ml.g6e.12xlarge": 2}, {}),
            RestartedOperator(operator_command(metrics_port=0), environ, log) as operator,
        ):
            bodies = [job(f"job-{number}") for number in range(JOBS)]
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
            made.kubectl("-n", NAMESPACE, "apply", "-f", "-", input=text)
            until("all jobs train", lambda: training(made) == JOBS, PATIENCE_S)
            at_rest = until("rest", lambda: calls_at_rest(made, operator), PATIENCE_S)
            starts, calls = operator.starts, made.calls()
            wrote = {who for kind in ("hyperpodpytorchjobs", "pods") for who in managers(made, kind)}
            assert operator.is_alive, f"the operator ended by itself: {log.read_text()[-3000:]}"
    watched = Counter(call.resource for call in calls if call.verb == "watch")
    assert set(watched) == {"hyperpodpytorchjobs", "nodes", "pods"}
    assert max(watched.values()) <= starts
    assert count_by_kind(calls)["create pods"] == 2 * JOBS
    assert set(at_rest) == {"get leases", "update leases"}, at_rest
    assert wrote - {"kubectl-client-side-apply", PLAYER} == {FIELD_MANAGER}
