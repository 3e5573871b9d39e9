"""A CRD that comes after the operator, or goes while it runs. A control plane of its own, because others need the CRD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.conftest import serve_jobs
from tests.api.jobs import apply, get, job
from tests.api.operator_processes import Operators, operators
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until

CRD = "hyperpodpytorchjobs.sagemaker.amazonaws.com"
WAITS = f"the API server does not serve {CRD} yet"


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Operators]:
    with (
        Cluster.up("api-late-crd", nodes=0, run_dir=tmp_path / "cluster") as cluster,
        operators(cluster, tmp_path, "default") as found,
    ):
        yield found


def waits(ours: Operators, name: str) -> None:
    wait_until(lambda: WAITS in ours.log(name), deadline_s=PATIENCE_S, what=f"{name} to wait", every_s=0.1)
    assert ours.running[name].poll() is None, ours.log(name)


def runs_jobs(ours: Operators) -> None:
    """Apply a job, and wait until an operator has written its status."""
    apply(ours.cluster, ours.namespace, job())

    def is_seen() -> bool:
        return bool(get(ours.cluster, ours.namespace, "llm").get("status", {}).get("conditions"))

    wait_until(is_seen, deadline_s=PATIENCE_S, what="the status of the job", every_s=0.1)


@pytest.mark.slow
def test_jobs_run_whenever_their_crd_comes(ours: Operators) -> None:
    """The first operator runs the jobs of all namespaces, its successor those of one."""
    ours.start("early", WATCH_NAMESPACES="")
    ours.leads("early")
    waits(ours, "early")
    serve_jobs(ours.cluster)
    runs_jobs(ours)

    ours.cluster.kubectl("-n", ours.namespace, "delete", "hpjob", "llm")
    ours.cluster.kubectl("delete", "crd", CRD)
    assert ours.running.pop("early").wait(PATIENCE_S) == 1, ours.log("early")
    ours.start("restarted")
    waits(ours, "restarted")
    serve_jobs(ours.cluster)
    runs_jobs(ours)
