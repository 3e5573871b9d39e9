"""An operator at rest: jobs train, nothing changes, and the API server hears of it only when the lease is renewed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bench.operator_load.cluster import NAMESPACE, LoadCluster, count_by_kind
from bench.operator_load.load import operator_command, operator_environment
from tests.api.compat_nodes import PlayedNodes, until
from tests.api.jobs import job
from tests.objects import list_objects
from tests.patience import PATIENCE_S

from elastipod_operator.core.names import FIELD_MANAGER

JOBS, RENEWALS = 20, 4  # a renewal every two seconds
PLAYER = "Python"  # who plays the nodes


@contextmanager
def operator(kubeconfig: Path, folder: Path) -> Iterator[None]:
    """Run the operator as a user of its own."""
    log = folder / "operator.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            operator_command(metrics_port=0), env=operator_environment(kubeconfig, folder), stdin=subprocess.DEVNULL,
            stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield
        assert process.poll() is None, f"the operator ended by itself: {log.read_text()[-3000:]}"
    finally:
        process.kill()  # at once: its farewell to the lease is no part of this
        process.wait(PATIENCE_S)


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


@pytest.mark.slow
def test_while_nothing_changes_no_call_is_made_but_for_the_lease(tmp_path: Path) -> None:
    with LoadCluster.up("rest", nodes=0, run_dir=tmp_path / "cluster") as made:
        assert isinstance(made, LoadCluster)
        kubeconfig = made.prepare()
        with PlayedNodes(made.kubeconfig, {"ml.g6e.12xlarge": 2}, {}), operator(kubeconfig, tmp_path):
            bodies = [job(f"job-{number}") for number in range(JOBS)]
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": bodies})
            made.kubectl("-n", NAMESPACE, "apply", "-f", "-", input=text)
            until("all jobs train", lambda: training(made) == JOBS, PATIENCE_S)
            # The last Event is written a moment after the last status: then there must be rest.
            until("rest", lambda: all(call.resource == "leases" for call in made.calls()[-4:]), PATIENCE_S)
            while_busy = made.calls()
            begin = len(while_busy)

            def renewed() -> bool:
                return count_by_kind(made.calls()[begin:])["update leases"] >= RENEWALS

            until(f"{RENEWALS} renewals of the lease", renewed, PATIENCE_S)
            at_rest = count_by_kind(made.calls()[begin:])
            wrote = {who for kind in ("hyperpodpytorchjobs", "pods") for who in managers(made, kind)}
    watched = [call.resource for call in while_busy if call.verb == "watch"]
    assert sorted(watched) == ["hyperpodpytorchjobs", "nodes", "pods"]
    assert count_by_kind(while_busy)["create pods"] == 2 * JOBS
    assert set(at_rest) == {"get leases", "update leases"}, at_rest
    assert wrote - {"kubectl-client-side-apply", PLAYER} == {FIELD_MANAGER}
