"""The CPUs to which --numa-binding binds a worker. The four modes are torch's.

node: CPUs of the device's NUMA node. socket: CPUs of all nodes of that socket. exclusive: an equal part of the node's physical cores,
not shared with another device of the node. core-complex: cores of the node that share one last-level cache, a different cache for each
device while there are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

CpuSet = frozenset[int]


class NoBinding(Exception):
    """The binding is not possible; one sentence says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Where devices and CPUs are. It holds only CPUs that this process may use.

    device_nodes: NUMA node by device index, as the workers number devices. sockets, cores and caches: by CPU; a core or a cache is
    named by its lowest CPU.
    """

    device_nodes: tuple[int, ...]
    node_cpus: Mapping[int, CpuSet]
    sockets: Mapping[int, int]
    cores: Mapping[int, int]
    caches: Mapping[int, int]


def cpus_for(mode: str, device: int, topology: Topology) -> CpuSet:
    """Give the CPUs for the worker of this device; never an empty set. Raises NoBinding."""
    if device >= len(topology.device_nodes):
        raise NoBinding(f"there is no device {device} for local rank {device}")
    node = topology.device_nodes[device]
    cpus = topology.node_cpus.get(node, frozenset())
    if not cpus:
        raise NoBinding(f"no CPU of NUMA node {node}, to which device {device} belongs, may be used here")
    return _MODES[mode](device, node, cpus, topology)


def _node(device: int, node: int, cpus: CpuSet, topology: Topology) -> CpuSet:
    return cpus


def _socket(device: int, node: int, cpus: CpuSet, topology: Topology) -> CpuSet:
    socket = topology.sockets[min(cpus)]
    return frozenset(cpu for cpu, its_socket in topology.sockets.items() if its_socket == socket)


def _exclusive(device: int, node: int, cpus: CpuSet, topology: Topology) -> CpuSet:
    cores = sorted({topology.cores[cpu] for cpu in cpus})
    place, num_devices = _place(device, node, topology)
    if len(cores) < num_devices:
        raise NoBinding(f"NUMA node {node} has {num_devices} devices but only {len(cores)} physical cores")
    each, rest = divmod(len(cores), num_devices)
    first = place * each + min(place, rest)
    mine = cores[first : first + each + (place < rest)]
    return frozenset(cpu for cpu in cpus if topology.cores[cpu] in mine)


def _core_complex(device: int, node: int, cpus: CpuSet, topology: Topology) -> CpuSet:
    complexes: dict[int, set[int]] = {}
    for cpu in cpus:
        complexes.setdefault(topology.caches[cpu], set()).add(cpu)
    largest_first = sorted(complexes, key=lambda name: (-len(complexes[name]), name))
    place, _ = _place(device, node, topology)
    return frozenset(complexes[largest_first[place % len(largest_first)]])


def _place(device: int, node: int, topology: Topology) -> tuple[int, int]:
    """Give the index of the device among those of its node, and their number."""
    devices = [index for index, its_node in enumerate(topology.device_nodes) if its_node == node]
    return devices.index(device), len(devices)


_MODES: dict[str, Callable[[int, int, CpuSet, Topology], CpuSet]] = {
    "node": _node,
    "socket": _socket,
    "exclusive": _exclusive,
    "core-complex": _core_complex,
}
