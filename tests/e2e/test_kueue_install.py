"""Kueue beside real nodes: a Job of its own integration is held, let go, and runs to its end in a real pod."""

from __future__ import annotations

import pytest
from tests.api.kueue_objects import apply, batch_job, queues, wait_for

from elastipod_local.cluster import Cluster


@pytest.fixture(scope="module")
def kueue(cluster: Cluster) -> Cluster:
    """The cluster of the tier with Kueue added while it runs; it stays for the tests that follow."""
    cluster.add_kueue()
    return cluster


@pytest.mark.slow
def test_a_job_waits_for_quota_and_runs(kueue: Cluster) -> None:
    kueue.kubectl("create", "namespace", "queued")
    try:
        apply(kueue, *queues("queued", "queued", cpu="1"))
        for name in ("first", "second"):
            apply(kueue, batch_job(name, "queued", "queued", cpu="800m"))
        wait_for(kueue, "queued", "job", "first", "Suspended", "False")
        wait_for(kueue, "queued", "job", "first", "Complete")
        # One pod's quota at a time: the second starts once the first has given it back.
        wait_for(kueue, "queued", "job", "second", "Complete")
    finally:
        kueue.kubectl("delete", "namespace", "queued", "--wait=false")
        kueue.kubectl("delete", "clusterqueue,resourceflavor", "queued", "--wait=false")
