"""An operator whose disk is full: it needs none, so jobs train and end as ever."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.compat_lives import last_condition, operator
from tests.api.compat_nodes import PlayedNodes
from tests.api.jobs import apply, get, job
from tests.patience import PATIENCE_S

from elastipod_local.cluster import Cluster
from elastipod_local.host import wait_until


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for the install key alone, which takes a page of memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_job_trains_and_ends_although_the_operator_can_write_nothing(
    api_server: Cluster, namespace: str, small_disk: Path
) -> None:
    with (
        PlayedNodes(api_server.kubeconfig, {"ml.c5.4xlarge": 2}, {}) as nodes,
        operator(api_server, small_disk, (namespace,), {"TMPDIR": str(small_disk), "LOG_LEVEL": "debug"}) as log,
    ):
        with pytest.raises(OSError, match="No space left"):
            (small_disk / "more").write_text("x")
        apply(api_server, namespace, job())

        def reaches(kind: str) -> None:
            wait_until(
                lambda: last_condition(get(api_server, namespace)).get("type") == kind,
                deadline_s=PATIENCE_S,
                what=f"the job to be {kind}",
            )

        reaches("Running")
        nodes.complete({"llm"})
        reaches("Completed")
        assert log.stat().st_size == 0, "not a line of its log found room"
