"""One API server for the whole tier: a control plane without nodes, with the CRD applied as a user does it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def bare_api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane without nodes and without our CRD."""
    with Cluster.up("api-tests", nodes=0, run_dir=tmp_path_factory.mktemp("api") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def api_server(bare_api_server: Cluster) -> Cluster:
    """The control plane with the CRD of `crds/`, served."""
    bare_api_server.kubectl("apply", "-f", str(CHECKOUT / "crds"))

    def is_served() -> bool:
        return bare_api_server.kubectl("get", "hpjob", "--all-namespaces", "-o", "json", check=False) != ""

    wait_until(is_served, deadline_s=30, what="the API server to serve jobs", every_s=0.1)
    return bare_api_server


@pytest.fixture
def namespace(api_server: Cluster) -> str:
    """A namespace of the test's own; it goes with the API server."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    api_server.kubectl("create", "namespace", name)
    return name
