"""Reads the topology of NVIDIA GPUs and CPUs from the kernel's files, and binds processes to CPUs. Needs neither torch nor numactl."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from elastipod_agent.core.numa import NoBinding, Topology

_ROOT = Path("/")


def read_topology(environ: Mapping[str, str], *, root: Path = _ROOT, allowed: Iterable[int] | None = None) -> Topology:
    """Read the topology. allowed: usable CPUs, by default those of this process. Raises NoBinding with one sentence."""
    usable = frozenset(os.sched_getaffinity(0) if allowed is None else allowed)
    cpus = root / "sys/devices/system/cpu"
    try:
        nodes = {
            int(node.name.removeprefix("node")): usable & _ranges(_text(node / "cpulist"))
            for node in (root / "sys/devices/system/node").glob("node[0-9]*")
        }
        return Topology(
            device_nodes=tuple(_node_of(address, root) for address in _visible_gpus(environ, root)),
            node_cpus=nodes,
            sockets={cpu: int(_text(cpus / f"cpu{cpu}/topology/physical_package_id")) for cpu in usable},
            cores={cpu: min(_ranges(_text(cpus / f"cpu{cpu}/topology/thread_siblings_list"))) for cpu in usable},
            caches={cpu: _last_cache(cpus / f"cpu{cpu}/cache", cpu) for cpu in usable},
        )
    except (OSError, ValueError) as error:
        raise NoBinding(f"the kernel does not show the topology of devices and CPUs: {error}") from error


def bind(pid: int, cpus: Iterable[int]) -> None:
    """Bind a process that was just started, with all its threads. A process that has ended is ignored."""
    chosen = set(cpus)
    with suppress(OSError):
        os.sched_setaffinity(pid, chosen)
        for task in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(task), chosen)


def _visible_gpus(environ: Mapping[str, str], root: Path) -> list[str]:
    """List the PCI addresses of the GPUs in the order in which CUDA numbers them in the workers. Raises NoBinding."""
    gpus = {path.parent.name: _text(path) for path in (root / "proc/driver/nvidia/gpus").glob("*/information")}
    if not gpus:
        raise NoBinding("there is no NVIDIA GPU")
    models = {_field(text, "Model") for text in gpus.values()}
    if len(models) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise NoBinding("there are GPUs of several models; set CUDA_DEVICE_ORDER=PCI_BUS_ID")
    in_order = sorted(gpus)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return in_order
    return [_named(entry.strip(), in_order, gpus) for entry in visible.split(",") if entry.strip()]


def _named(entry: str, in_order: list[str], gpus: Mapping[str, str]) -> str:
    if entry.isdecimal() and int(entry) < len(in_order):
        return in_order[int(entry)]
    fitting = [
        address
        for address in in_order
        if entry.startswith("GPU-") and _field(gpus[address], "GPU UUID").startswith(entry)
    ]
    if len(fitting) != 1:
        raise NoBinding(f"CUDA_VISIBLE_DEVICES names {entry!r}, which is not a GPU of this machine")
    return fitting[0]


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}:\s*(.*?)\s*$", text, re.MULTILINE)
    return found[1] if found else ""


def _node_of(address: str, root: Path) -> int:
    """Give a device's NUMA node. The kernel often shows -1 on a machine with only one."""
    return max(0, int(_text(root / "sys/bus/pci/devices" / address / "numa_node")))


def _last_cache(folder: Path, cpu: int) -> int:
    """Name the last-level cache of a CPU by the lowest CPU that shares it; by the CPU itself if none is shown."""
    level, shared = -1, {cpu}
    for index in folder.glob("index[0-9]*"):
        if _text(index / "type").strip() in ("Unified", "Data") and int(_text(index / "level")) > level:
            level, shared = int(_text(index / "level")), _ranges(_text(index / "shared_cpu_list"))
    return min(shared)


def _ranges(text: str) -> set[int]:
    """Parse a list like ``0-3,8``."""
    found: set[int] = set()
    for span in text.strip().split(","):
        if span:
            first, _, last = span.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found


def _text(path: Path) -> str:
    return path.read_text("utf-8")
