"""Helm, and one API server on which the chart is installed as a user does it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastipod_local.cluster import Cluster

CHART = Path(__file__).resolve().parents[2] / "charts" / "elastipod"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane without nodes: what is installed is checked and stored, but no pod runs."""
    # Who names an owner that waits for the object needs the right to keep that owner, as on OpenShift.
    flags = ["--enable-admission-plugins=OwnerReferencesPermissionEnforcement"]
    where = tmp_path_factory.mktemp("chart") / "cluster"
    with Cluster.up("chart-tests", nodes=0, run_dir=where, api_server_flags=flags) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def installed(cluster: Cluster) -> Cluster:
    """The control plane with the chart installed in a namespace that admits restricted pods only."""
    cluster.kubectl("create", "namespace", "aws-hyperpod")
    cluster.kubectl("label", "namespace", "aws-hyperpod", "pod-security.kubernetes.io/enforce=restricted")
    cluster.helm("install", "elastipod", str(CHART), "--namespace", "aws-hyperpod")
    return cluster
