"""How many workers a pod runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod_agent.devices import BadWorkerCount, count_cpus, resolve_nproc


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "visible", "count"),
    [
        pytest.param("4", None, 4, id="a number"),
        pytest.param("gpu", None, 3, id="device nodes are counted, control nodes are not"),
        pytest.param("auto", None, 3, id="auto takes accelerators"),
        pytest.param("gpu", "0,1", 2, id="only what CUDA sees"),
        pytest.param("gpu", "0,-1,1", 1, id="CUDA stops at the first bad entry"),
    ],
)
def test_counts(dev: Path, wanted: str, visible: str | None, count: int) -> None:
    assert resolve_nproc(wanted, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, dev=dev) == count


def test_without_accelerators_auto_means_cpus(tmp_path: Path) -> None:
    assert resolve_nproc("auto", {}, dev=tmp_path) == resolve_nproc("cpu", {}, dev=tmp_path) == count_cpus()


@pytest.mark.parametrize("wanted", ["gpu", "0", "-1", "many", "", "99999"])
def test_refused(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(BadWorkerCount, match="--nproc-per-node"):
        resolve_nproc(wanted, {}, dev=tmp_path)
