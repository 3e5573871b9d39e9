"""Finding the worker to kill among all processes of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod_local.demo.kill import Worker, kill_worker, workers_of
from elastipod_local.errors import LocalClusterError

POD = "0d1e"


def process(proc: Path, pid: int, *, parent: int = 1, pod: str = POD, **environ: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(f"5:memory:/demo/node1/kubepods/besteffort/pod{pod}/abc\n")
    (folder / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in environ.items()))
    (folder / "stat").write_text(f"{pid} (a) b) S {parent} 1 1 0 -1\n")


def test_workers_are_those_processes_of_the_pod_that_have_a_rank(tmp_path: Path) -> None:
    process(tmp_path, 10, PATH="/bin")  # the agent
    process(tmp_path, 11, parent=10, RANK="2", LOCAL_RANK="0")
    process(tmp_path, 12, parent=10, RANK="-1", LOCAL_RANK="1")  # started before its rank was known
    process(tmp_path, 13, parent=12, RANK="-1", LOCAL_RANK="1")  # its data loader
    process(tmp_path, 20, parent=10, pod="other", RANK="0", LOCAL_RANK="0")
    assert sorted(workers_of(POD, proc=tmp_path), key=lambda worker: worker.pid) == [Worker(11, 0), Worker(12, 1)]


def test_processes_that_end_meanwhile_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "77").mkdir()
    assert list(workers_of(POD, proc=tmp_path)) == []


def test_a_pod_without_workers_is_named() -> None:
    with pytest.raises(LocalClusterError, match="no-such-pod has no worker process"):
        kill_worker("no-such-pod")
