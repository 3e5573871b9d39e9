"""Processes of a cluster: known by their start and their tag, and never mistaken for others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENCE_S

from elastipod_local.host import wait_until
from elastipod_local.processes import TAG, ProcessId, kill_all_tagged, kill_if_tagged, spawn, tagged

SLEEP = [sys.executable, "-c", "import time; print('on', flush=True); time.sleep(60)"]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, which only Linux has")


@pytest.fixture
def started(tmp_path: Path) -> ProcessId:
    """A process with our tag that runs its own program by now."""
    process = spawn(SLEEP, owner=tmp_path, log=tmp_path / "log")
    wait_until(lambda: "on" in (tmp_path / "log").read_text(), deadline_s=PATIENCE_S, what="the process to run")
    return process


def test_a_process_is_found_by_its_tag_and_ended(tmp_path: Path, started: ProcessId) -> None:
    assert list(tagged(tmp_path)) == [started.pid]
    assert started.is_alive()
    assert kill_all_tagged(tmp_path) == 1
    assert not started.is_alive()
    assert kill_all_tagged(tmp_path) == 0


def test_a_tag_of_another_cluster_protects(tmp_path: Path, started: ProcessId) -> None:
    other = tmp_path / "log"  # begins alike
    assert not kill_if_tagged(started.pid, other)
    assert list(tagged(Path(str(tmp_path)[:-1]))) == []
    assert started.is_alive()
    kill_all_tagged(tmp_path)


def test_the_same_pid_with_another_start_is_another_process() -> None:
    me = ProcessId.of(os.getpid())
    assert me is not None
    assert me.is_alive()
    assert not ProcessId(me.pid, me.started - 1).is_alive()


def test_a_process_whose_threads_still_run_is_alive(tmp_path: Path) -> None:
    """A killed etcd whose main thread has ended first, and which writes to a slow disk, still has its port."""
    script = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    process = spawn([sys.executable, "-c", script], owner=tmp_path, log=tmp_path / "log")
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(
        lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z",
        deadline_s=PATIENCE_S,
        what="the main thread to end",
    )
    assert process.is_alive()
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not process.is_alive(), deadline_s=PATIENCE_S, what="the other thread to end")


def test_a_process_that_has_ended_has_no_identity() -> None:
    done = subprocess.Popen([sys.executable, "-c", ""], env={TAG: "/x"})
    wait_until(lambda: ProcessId.of(done.pid) is None, deadline_s=PATIENCE_S, what="the process to end")
    done.wait()
    assert not kill_if_tagged(done.pid, Path("/x"))
