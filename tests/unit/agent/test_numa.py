"""Which CPUs a worker is bound to, and reading where they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.numa import binding

from elastipod_agent.core.numa import NoBinding, Topology, cpus_for
from elastipod_agent.topology import bind, read_topology

MODES = ("node", "socket", "exclusive", "core-complex")


class Machine:
    """The kernel's files of a machine with two sockets of two nodes each, two threads a core, and two caches a node."""

    def __init__(self, root: Path, *, devices: dict[str, int]) -> None:
        self.root = root
        self.addresses = sorted(devices)
        for node in range(4):
            self.write(f"sys/devices/system/node/node{node}/cpulist", f"{node * 8}-{node * 8 + 7}\n")
        self.write("sys/devices/system/node/possible", "0-3\n")
        for cpu in range(32):
            place = f"sys/devices/system/cpu/cpu{cpu}"
            self.write(f"{place}/topology/physical_package_id", f"{cpu // 16}\n")
            core = cpu // 8 * 8 + cpu % 4
            self.write(f"{place}/topology/thread_siblings_list", f"{core},{core + 4}\n")
            cache = cpu // 8 * 8 + cpu % 4 // 2 * 2
            self.write(f"{place}/cache/index1/type", "Instruction\n")
            for index, level, shared in ((0, 1, str(cpu)), (3, 3, f"{cache}-{cache + 1},{cache + 4}-{cache + 5}")):
                for name, text in (("type", "Unified"), ("level", str(level)), ("shared_cpu_list", shared)):
                    self.write(f"{place}/cache/index{index}/{name}", f"{text}\n")
        for number, (address, node) in enumerate(sorted(devices.items())):
            self.write(f"sys/bus/pci/devices/{address}/numa_node", f"{node}\n")
            self.write(
                f"proc/driver/nvidia/gpus/{address}/information",
                f"Model: \t\t H100\nIRQ: \t\t 1\nGPU UUID: \t GPU-{number}a-b\nDevice Minor: \t {number}\n",
            )

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text, "utf-8")

    def topology(self, allowed: set[int] | None = None, **environ: str) -> Topology:
        return read_topology(environ, root=self.root, allowed=allowed or set(range(32)))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path, devices={"0000:0a:00.0": 0, "0000:1b:00.0": 0, "0000:2c:00.0": 0, "0000:9d:00.0": 3})


def test_a_node_that_nobody_knows_has_no_cpu() -> None:
    empty = Topology(device_nodes=(5,), node_cpus={}, sockets={}, cores={}, caches={})
    with pytest.raises(NoBinding, match="no CPU of NUMA node 5, to which device 0 belongs"):
        cpus_for("node", 0, empty)


def test_the_four_modes(machine: Machine) -> None:
    topology = machine.topology()
    chosen = {mode: [sorted(cpus_for(mode, device, topology)) for device in range(4)] for mode in MODES}
    assert chosen["node"] == [list(range(8))] * 3 + [list(range(24, 32))]
    assert chosen["socket"] == [list(range(16))] * 3 + [list(range(16, 32))]
    assert chosen["exclusive"] == [[0, 1, 4, 5], [2, 6], [3, 7], list(range(24, 32))]
    assert chosen["core-complex"] == [[0, 1, 4, 5], [2, 3, 6, 7], [0, 1, 4, 5], [24, 25, 28, 29]]


def test_as_many_cores_as_devices_are_enough(machine: Machine) -> None:
    topology = machine.topology({0, 1, 2, 5})
    assert [sorted(cpus_for("exclusive", device, topology)) for device in range(3)] == [[0], [1, 5], [2]]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "allowed", [set(range(32)), {0, 1, 2, 3, 6, 9, 20, 24, 25, 28, 31}], ids=["all CPUs", "some CPUs"]
)
def test_torch_chooses_the_same(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, mode: str, allowed: set[int]
) -> None:
    """The installed torch's own choice, made to read the same files."""
    real_open, real_list = open, os.listdir

    def moved(path: Any) -> Any:
        return str(machine.root) + path if isinstance(path, str) and path.startswith("/sys/") else path

    def numa_node(*, device_index: int) -> int:
        path = f"/sys/bus/pci/devices/{machine.addresses[device_index]}/numa_node"
        with real_open(f"{machine.root}{path}", encoding="ascii") as file:
            return max(0, int(file.read()))

    monkeypatch.setattr("builtins.open", lambda path, *rest, **named: real_open(moved(path), *rest, **named))
    monkeypatch.setattr(os, "listdir", lambda path: real_list(moved(path)))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    monkeypatch.setattr(binding, "_get_numa_node_index_for_device_index", numa_node)
    monkeypatch.setattr(binding, "_get_device_count", lambda: len(machine.addresses))
    # torch cannot tell the socket of a node of which no CPU is allowed: the mask leaves one everywhere
    options = binding.NumaOptions(affinity_mode=binding.AffinityMode(mode))
    wanted = [binding._get_logical_cpus_to_bind_to(device_index=index, numa_options=options) for index in range(4)]
    monkeypatch.undo()
    topology = machine.topology(allowed)
    assert [set(cpus_for(mode, index, topology)) for index in range(4)] == wanted


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        pytest.param(None, (0, 0, 0, 3), id="all"),
        pytest.param("3,0", (3, 0), id="by number"),
        pytest.param("GPU-3a,GPU-0a-b", (3, 0), id="by UUID"),
    ],
)
def test_devices_are_numbered_as_the_workers_see_them(
    machine: Machine, visible: str | None, nodes: tuple[int, ...]
) -> None:
    environ: dict[str, Any] = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert machine.topology(**environ).device_nodes == nodes


def test_a_machine_that_tells_no_node_has_one(tmp_path: Path) -> None:
    assert Machine(tmp_path, devices={"0000:0a:00.0": -1}).topology().device_nodes == (0,)


@pytest.mark.parametrize(
    ("mode", "device", "allowed", "environ", "why"),
    [
        ("node", 4, set(), {}, "no device 4 for local rank 4"),
        ("node", 3, {1, 2}, {}, "no CPU of NUMA node 3"),
        ("exclusive", 0, {0, 1, 4, 5}, {}, "3 devices but only 2 physical cores"),
        ("node", 0, set(), {"CUDA_VISIBLE_DEVICES": "MIG-1"}, "'MIG-1', which is not a GPU of this machine"),
        ("node", 0, set(), {"CUDA_VISIBLE_DEVICES": "7"}, "'7', which is not a GPU of this machine"),
    ],
)
def test_why_there_is_no_binding(
    machine: Machine, mode: str, device: int, allowed: set[int], environ: dict[str, str], why: str
) -> None:
    with pytest.raises(NoBinding, match=why):
        cpus_for(mode, device, machine.topology(allowed, **environ))


def test_gpus_of_several_models_need_a_stated_order(machine: Machine) -> None:
    information = machine.root / "proc/driver/nvidia/gpus/0000:0a:00.0/information"
    information.write_text(information.read_text("utf-8").replace("H100", "T4"), "utf-8")
    with pytest.raises(NoBinding, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        machine.topology()
    assert machine.topology(CUDA_DEVICE_ORDER="PCI_BUS_ID").device_nodes == (0, 0, 0, 3)


def test_without_gpus_or_files_of_the_kernel_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(NoBinding, match="no NVIDIA GPU"):
        read_topology({}, root=tmp_path, allowed={0})
    (tmp_path / "proc/driver/nvidia/gpus/0000:0a:00.0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:0a:00.0/information").write_text("Model: H100\n", "utf-8")
    with pytest.raises(NoBinding, match="the kernel does not show"):
        read_topology({}, root=tmp_path, allowed={0})


def test_a_process_is_bound_with_all_its_threads() -> None:
    script = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\nprint(flush=True)\ntime.sleep(60)"
    one_cpu = {max(os.sched_getaffinity(0))}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        bind(process.pid, one_cpu)
        threads = os.listdir(f"/proc/{process.pid}/task")
        bound = [os.sched_getaffinity(int(thread)) for thread in threads]
        process.kill()
    assert bound == [one_cpu] * 2


def test_a_process_that_is_gone_is_not_bound() -> None:
    bind(2**22 + 1, {0})
