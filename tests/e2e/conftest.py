"""A real cluster for the e2e tests of jobs: four nodes with room for one replica each, the operator installed from its chart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.job_run import JobRun

from elastipod_local.cluster import Cluster
from elastipod_local.state import NodeOptions

ROOT = Path(__file__).resolve().parents[2]
OPERATOR_NAMESPACE = "aws-hyperpod"


@pytest.fixture(scope="session")
def cluster(worker_id: str) -> Iterator[Cluster]:
    """The cluster with the operator; taken down at the end of the session. Each process of pytest-xdist has its own."""
    name = "e2e" if worker_id == "master" else f"e2e-{worker_id}"
    with Cluster.up(name, nodes=4, options=NodeOptions(cpus=1), progress=print) as made:
        chart = ("install", "elastipod", str(ROOT / "charts" / "elastipod"))
        where = ("--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--set", "image.tag=dev")
        made.helm(*chart, *where, "--wait", "--timeout", "90s")
        made.kubectl("apply", "-f", str(ROOT / "examples" / "storage.yaml"))
        yield made


@pytest.fixture
def job(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[JobRun]:
    """A job named after the test; deleted with everything of it afterwards."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")[:40].strip("-")
    run = JobRun(cluster, name)
    yield run
    run.delete()
