"""One API server for the whole tier: a control plane without nodes, with the CRD applied as a user does it."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import client, config
from tests.api.kueue_objects import FAIR_KUEUE
from tests.api.rights import audit_flags
from tests.objects import FOLDERS, is_served, look
from tests.patience import PATIENCE_S
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]  # xdist has no annotations

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until
from elastipod_local.kueue_config import KueueOptions
from elastipod_operator.kube.api import Api

CHECKOUT = Path(__file__).resolve().parents[2]
USES_KUEUE = re.compile("(?:kueue_server|kueue_namespace|fair_jobs_server)[:,]")  # in the arguments of a test


class FilesOfKueueTogether(LoadFileScheduling):  # type: ignore[misc]  # as above
    """File after file, those that ask for Kueue as if they were one: only one of the processes starts its API servers."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "kueue" if USES_KUEUE.search((CHECKOUT / file).read_text("utf-8")) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Say which process runs which test, where files stay together."""
    return FilesOfKueueTogether(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def bare_api_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane without nodes and without our CRD."""
    with Cluster.up("api-tests", nodes=0, run_dir=tmp_path_factory.mktemp("api") / "cluster") as cluster:
        yield cluster


def serve_jobs(cluster: Cluster) -> None:
    """Apply the CRD of `crds/` and wait until the API server serves it."""
    cluster.kubectl("apply", "-f", str(CHECKOUT / "crds"))
    kind = "hyperpodpytorchjobs"

    def is_described() -> bool:
        """The description of a kind follows a moment after the kind itself."""
        if look(cluster, f"/openapi/v3{FOLDERS[kind]}") is None or not is_served(cluster, kind):
            return False
        return cluster.kubectl("explain", "hpjob.spec.elasticPolicy", check=False) != ""

    wait_until(is_described, deadline_s=PATIENCE_S, what="the API server to serve jobs", every_s=0.1)


@pytest.fixture(scope="session")
def api_server(bare_api_server: Cluster) -> Cluster:
    """The control plane with the CRD of `crds/`, served."""
    serve_jobs(bare_api_server)
    return bare_api_server


@pytest.fixture
def namespace(api_server: Cluster) -> str:
    """A namespace of the test's own; it goes with the API server."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    api_server.kubectl("create", "namespace", name)
    return name


@pytest.fixture
async def api(api_server: Cluster) -> AsyncIterator[Api]:
    """The operator's calls, with the administrator's rights."""
    configuration = client.Configuration()
    await config.load_kube_config(config_file=str(api_server.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]  # the client has no annotations here
    calls = client.ApiClient(configuration)
    yield Api(calls)
    await calls.close()  # type: ignore[no-untyped-call]  # the client has no annotations here


@pytest.fixture(scope="session")
def kueue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane of its own with Kueue, its webhooks and our CRD."""
    folder = tmp_path_factory.mktemp("kueue")
    where, flags = folder / "cluster", audit_flags(folder)
    with Cluster.up("api-kueue", nodes=0, run_dir=where, kueue=KueueOptions(), api_server_flags=flags) as cluster:
        serve_jobs(cluster)
        yield cluster


@pytest.fixture(scope="session")
def fair_kueue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A second one beside it, whose Kueue shares fairly and has the pod integration on."""
    folder = tmp_path_factory.mktemp("fair-kueue") / "cluster"
    with Cluster.up("api-fair-kueue", nodes=0, run_dir=folder, kueue=FAIR_KUEUE) as cluster:
        cluster.kubectl("create", "namespace", "other")
        yield cluster


@pytest.fixture
def kueue_namespace(kueue_server: Cluster) -> str:
    """A namespace of the test's own in `kueue_server`; it goes with the cluster."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    kueue_server.kubectl("create", "namespace", name)
    return name


@pytest.fixture(scope="session")
def fair_jobs_server(fair_kueue_server: Cluster) -> Cluster:
    """That second one, with our CRD served."""
    serve_jobs(fair_kueue_server)
    return fair_kueue_server
