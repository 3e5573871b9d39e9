"""How many workers a pod runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod_agent.devices import BadWorkerCount, count_cpus, own_devices, resolve_nproc


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


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        pytest.param({}, 16, id="a worker for each device"),
        pytest.param({"NEURON_RT_VISIBLE_CORES": "0-3,6"}, 5, id="a worker for each core that the pod got"),
        pytest.param({"NEURON_RT_VISIBLE_CORES": "4"}, 1, id="one core"),
        pytest.param({"NEURON_RT_NUM_CORES": "32"}, 32, id="a number of cores"),
        pytest.param({"NEURON_RT_NUM_CORES": ""}, 16, id="an empty variable says nothing"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0"}, 16, id="CUDA's variable is not about them"),
    ],
)
def test_neuron_devices_are_counted_like_gpus(tmp_path: Path, environ: dict[str, str], count: int) -> None:
    for name in (*(f"neuron{number}" for number in range(16)), "neuron_reset"):
        (tmp_path / name).touch()
    assert resolve_nproc("auto", environ, dev=tmp_path) == count


def test_cores_that_nobody_can_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "neuron0").touch()
    with pytest.raises(
        BadWorkerCount, match="NEURON_RT_VISIBLE_CORES is '0-x'; it must be cores and ranges such as 0-3,6"
    ):
        resolve_nproc("auto", {"NEURON_RT_VISIBLE_CORES": "0-x"}, dev=tmp_path)


def test_another_kind_of_device_is_asked_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$3" = xpu ] && echo 4\n', "utf-8")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    assert resolve_nproc("xpu", {}, dev=tmp_path) == 4
    with pytest.raises(BadWorkerCount, match="torch sees no such device"):
        resolve_nproc("npu", {}, dev=tmp_path)


@pytest.mark.parametrize(
    ("environ", "devices"),
    [
        pytest.param({}, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}], id="all are visible"),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": "GPU-a, 3,5"},
            [{"CUDA_VISIBLE_DEVICES": "GPU-a"}, {"CUDA_VISIBLE_DEVICES": "3"}],
            id="some are",
        ),
        pytest.param(
            {"CUDA_VISIBLE_DEVICES": "8,9", "HIP_VISIBLE_DEVICES": "2,3"},
            [{"CUDA_VISIBLE_DEVICES": device, "HIP_VISIBLE_DEVICES": device} for device in "23"],
            id="ROCm's variable wins",
        ),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, [{"CUDA_VISIBLE_DEVICES": ""}] * 2, id="none is"),
    ],
)
def test_devices_of_single_workers(environ: dict[str, str], devices: list[dict[str, str]]) -> None:
    assert list(own_devices(2, environ)) == devices


@pytest.mark.parametrize("wanted", ["gpu", "0", "-1", "many", "", "99999"])
def test_refused(tmp_path: Path, wanted: str) -> None:
    with pytest.raises(BadWorkerCount, match="--nproc-per-node"):
        resolve_nproc(wanted, {}, dev=tmp_path)


@pytest.mark.parametrize("node", ["kfd", "davinci_manager", "dri/renderD128", "accel", "hl0"])
def test_accelerators_of_other_makers_are_counted_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    monkeypatch.setattr("elastipod_agent.devices._ask_torch", lambda *_: 8)
    assert resolve_nproc("auto", {}, dev=tmp_path) == count_cpus(), "nothing to ask about"
    (tmp_path / node).parent.mkdir(exist_ok=True)
    (tmp_path / node).touch()
    assert resolve_nproc("auto", {}, dev=tmp_path) == 8


def test_as_many_workers_as_a_pod_may_have(tmp_path: Path) -> None:
    assert (resolve_nproc("1", {}, dev=tmp_path), resolve_nproc(" 4096 ", {}, dev=tmp_path)) == (1, 4096)
    with pytest.raises(BadWorkerCount, match="'4097'; it must be auto, cpu, gpu, xpu or 1 to 4096"):
        resolve_nproc("4097", {}, dev=tmp_path)


@pytest.mark.parametrize("script", ["exit 3", "echo 4; exit 1", "echo many", "true", "no-such-program"])
def test_a_torch_that_does_not_answer_sees_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", "utf-8")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(BadWorkerCount, match="--nproc-per-node is xpu, but torch sees no such device in this pod"):
        resolve_nproc("xpu", {}, dev=tmp_path)
