"""Ctrl-C in the demo, at several of its steps: it says so and removes all that it created."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.e2e.conftest import ROOT
from tests.e2e.leaks import processes_of, traces
from tests.long_runs import LongRun

from elastipod_local.cluster import Cluster
from elastipod_local.demo.main import INTERRUPTED
from elastipod_local.host import wait_until
from elastipod_local.paths import cluster_dir

NAME = "demo"
STEP_S = 1500  # until a step begins; the first run of a machine builds Kubernetes
GONE_S = 300


@pytest.mark.timeout(2000)
@pytest.mark.long("demo-interrupt")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param("start a Kubernetes cluster", id="while the control plane starts"),
        pytest.param("install the operator", id="while images, Kueue and the operator are installed"),
        pytest.param("wait until 2 replicas train", id="while workers start"),
        pytest.param("add 2 nodes", id="while nodes are added"),
    ],
)
def test_ctrl_c_leaves_nothing(step: str, tmp_path: Path, long_run: LongRun, request: pytest.FixtureRequest) -> None:
    folder, output = cluster_dir(NAME), tmp_path / "demo.log"
    assert not (folder / "kubeconfig").exists(), "a demo is up already"
    before = traces()
    with output.open("wb") as log:
        # A process group of its own, as a terminal gives it to a command: Ctrl-C reaches kubectl and its kin too.
        demo = subprocess.Popen(
            [sys.executable, "-m", "elastipod_local.demo.main"],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(
            lambda: step in output.read_text() or demo.poll() is not None, deadline_s=STEP_S, what=f"the step: {step}"
        )
        wait_until(
            lambda: (folder / "state.json").exists() or demo.poll() is not None, deadline_s=STEP_S, what="its cluster"
        )
        assert demo.poll() is None, output.read_text()[-3000:]
        own = Cluster(NAME, folder).state().addressing
        began = time.monotonic()
        os.killpg(demo.pid, signal.SIGINT)
        assert demo.wait(GONE_S) == INTERRUPTED, output.read_text()[-3000:]
    finally:
        demo.terminate()  # it takes its cluster down
        demo.wait(GONE_S)
    long_run.count(**{f"{request.node.callspec.id}: gone after s": round(time.monotonic() - began, 1)})
    assert "demo: interrupted; taking everything down" in output.read_text()
    assert "Traceback" not in output.read_text()
    assert processes_of(folder) == []
    assert traces().new_since(before, own) == {}
    assert {entry.name for entry in folder.iterdir()} <= {"logs", "lock", "shared"}
