"""Changes to the nodes of a running cluster: add, remove, drain, and simulated failures."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from elastipod_local import network
from elastipod_local.addressing import API_PORT, MAX_NODES, free_node_index
from elastipod_local.controlplane import ControlPlane
from elastipod_local.errors import LocalClusterError, WaitedTooLongError
from elastipod_local.host import Progress, Reminder, run, signals_ignored, tail_of, wait_until
from elastipod_local.node import Disk, Node
from elastipod_local.node_config import SLOT_RESOURCE
from elastipod_local.oci import Image
from elastipod_local.processes import ProcessId
from elastipod_local.state import NodePhase, NodeRecord, StateFile

READY_DEADLINE_S = 180
REPORT_EVERY_S = 15.0
DRAIN_DEADLINE_S = 900
# What a node must be in for a change; everything else is refused with a sentence.
RUNNING = frozenset({NodePhase.UP})
ALLOWED: dict[str, frozenset[NodePhase]] = {
    "kill": frozenset({NodePhase.UP, NodePhase.FROZEN, NodePhase.PARTITIONED, NodePhase.STARTING}),
    "return": frozenset({NodePhase.OFF}),
    "freeze": RUNNING,
    "thaw": frozenset({NodePhase.FROZEN}),
    "partition": RUNNING,
    "heal": frozenset({NodePhase.PARTITIONED}),
}


class Nodes:
    """The nodes of one cluster. Hold the cluster's lock around every call that changes something."""

    def __init__(self, files: StateFile, control_plane: ControlPlane, progress: Progress) -> None:
        self._files = files
        self._control_plane = control_plane
        self._progress = progress

    # --- adding and removing ---

    def add(self, count: int, disk: Disk) -> list[str]:
        """Add nodes, all at once, and return their names when they are Ready and offer their slots."""
        names: list[str] = []
        try:
            for _ in range(count):
                names.append(self._register())
            self._start_all(names, disk)
        except BaseException:
            with signals_ignored():
                self._discard_failed(names)
            raise
        return names

    def bring_back(self, name: str, disk: Disk) -> None:
        """Switch a node on again after `kill`; its disk is unchanged, its containers are restarted."""
        self._demand(name, "return")
        self._end(name)  # it is off already, unless a run was cut short while it cut the power
        self._set_phase(name, NodePhase.STARTING)
        # What its Node object says is from before the power loss; its lease tells that it lives again.
        self._start_all([name], disk, heard_after=datetime.now(timezone.utc))

    def drain(self, name: str, *, grace_period_s: int | None = None, deadline_s: int = DRAIN_DEADLINE_S) -> None:
        """Cordon the node and evict its pods through the Eviction API, as `kubectl drain` does; daemon pods stay."""
        self._record(name)
        grace = [] if grace_period_s is None else [f"--grace-period={grace_period_s}"]
        self._kubectl(
            *("drain", name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={deadline_s}s"),
            *grace,
            deadline_s=deadline_s + 30,
        )

    def remove(self, name: str, *, drain: bool = True) -> None:
        """Drain the node (if it runs), delete its Node object, end its processes and delete its disk."""
        record = self._record(name)
        if drain and record.phase is NodePhase.UP:
            self.drain(name)
        self._set_phase(name, NodePhase.REMOVING)
        self._discard(name)

    # --- failures ---

    def kill(self, name: str) -> None:
        """Cut the node's power: kubelet, containerd and all pods die at once, without notice."""
        self._demand(name, "kill")
        self._set_phase(name, NodePhase.OFF)
        self._end(name)

    def freeze(self, name: str, *, frozen: bool) -> None:
        """Freeze every process of the node, or resume them."""
        self._demand(name, "freeze" if frozen else "thaw")
        self._node(name).group.freeze(frozen=frozen)
        self._set_phase(name, NodePhase.FROZEN if frozen else NodePhase.UP)

    def partition(self, name: str, *, cut: bool) -> None:
        """Cut the node's network, or restore it."""
        self._demand(name, "partition" if cut else "heal")
        node = self._node(name)
        network.set_link(node.addressing, node.index, "down" if cut else "up")
        self._set_phase(name, NodePhase.PARTITIONED if cut else NodePhase.UP)

    def import_images(self, images: Iterable[Image]) -> None:
        """Import images into every node that runs, all nodes at once."""
        wanted = list(images)

        def import_into(name: str) -> None:
            inner = self._record(name).inner
            assert inner is not None  # it is up
            self._node(name).import_images(inner, wanted)

        up = [name for name, record in self._files.read().nodes.items() if record.phase is NodePhase.UP]
        with ThreadPoolExecutor(max_workers=max(1, len(up))) as pool:
            list(pool.map(import_into, up))

    # --- helpers ---

    def _end(self, name: str) -> Node:
        """End the node's processes at once, and then its wire."""
        node = self._node(name)
        # The wire is cut first: a node without power closes no connection of its pods.
        network.set_link(node.addressing, node.index, "down")
        node.end(_processes(self._record(name)))
        network.delete_link(node.addressing.link_name(node.index))
        return node

    def _discard(self, name: str) -> None:
        """Delete the node's object, end it, delete its disk, and forget it."""
        self._delete_objects([name])
        self._erase(name)

    def _discard_failed(self, names: list[str]) -> None:
        """Discard nodes that did not start. What fails on the way is told: it hides neither their failure nor the other nodes."""
        try:
            self._delete_objects(names)
        except LocalClusterError as refused:
            self._progress(f"the Node objects of {', '.join(names)} could not be deleted: {refused}")
        for name in names:
            try:
                self._erase(name)
            except (LocalClusterError, OSError) as stuck:
                self._progress(f"{name} could not be removed: {stuck}")

    def _delete_objects(self, names: list[str]) -> None:
        if names:
            self._kubectl("delete", "node", *names, "--ignore-not-found", deadline_s=60)

    def _erase(self, name: str) -> None:
        self._end(name).delete()
        self._files.update(lambda state: state.with_node(name, None))

    def _register(self) -> str:
        """Write down a node that is about to be made."""
        index = free_node_index(record.index for record in self._files.read().nodes.values())
        if index is None:
            raise LocalClusterError(f"the cluster has {MAX_NODES} nodes, and there are no addresses for more")
        name = f"node-{index}"
        self._files.update(lambda state: state.with_node(name, NodeRecord(index, NodePhase.STARTING)))
        return name

    def _start_all(self, names: list[str], disk: Disk, *, heard_after: datetime | None = None) -> None:
        if not names:
            return
        self._progress(f"starting {', '.join(names)}")
        # Objects are created one after the other, so that after an interruption no thread is still creating them. The starts
        # themselves, which take time, run in parallel.
        for name in names:
            self._node(name).prepare(self._control_plane, self._files.read().options, disk)
        for name in names:
            self._start(name)
        for name in names:
            self._connect(name)
        self._wait_ready(names, heard_after)

    def _wait_ready(self, names: list[str], heard_after: datetime | None) -> None:
        self._progress("waiting for the nodes to be Ready")
        reminder = Reminder(self._progress, every_s=REPORT_EVERY_S)
        unready = set(names)

        def all_ready() -> bool:
            nonlocal unready
            unready = self._unready(names, heard_after)
            if unready:
                reminder.remind(f"  {', '.join(sorted(unready))} not Ready yet")
            return not unready

        try:
            wait_until(all_ready, deadline_s=READY_DEADLINE_S, what="the nodes to be Ready", every_s=0.2)
        except WaitedTooLongError as late:
            missing = sorted(unready)
            raise LocalClusterError(
                f"waited {READY_DEADLINE_S:g} s for {', '.join(missing)} to be Ready; "
                f"{self._why_unreachable(missing)}logs: {self._files.folder / 'logs'}"
            ) from late

    def _why_unreachable(self, names: list[str]) -> str:
        """Say which node cannot reach the API server, which lives: only a firewall is between the two."""
        where = self._control_plane.addressing
        for name in names:
            inner = self._record(name).inner
            if inner is not None and (said := network.refusal(inner.pid, where.api_address, API_PORT)):
                return (
                    f"{name} cannot reach the API server ({where.api_address}:{API_PORT} {said.lower()}); "
                    f"let this machine's firewall accept what comes in on {where.kernel_name}; "
                )
        return ""

    def _unready(self, names: list[str], since: datetime | None) -> set[str]:
        """Give those of the nodes that are not Ready or, with `since`, whose kubelet has not been heard of after it.

        Raises LocalClusterError when a node, or what it needs of the control plane, has ended.
        """
        self._control_plane.require_serving(self._files.read().control_plane)
        for name in names:
            outer = self._record(name).outer
            if outer is None or not outer.is_alive():
                raise LocalClusterError(f"{name} ended at its start: {tail_of(self._node(name).log)}")
        server = self._control_plane.api_server
        found = server.get("/api/v1/nodes") or {"items": []}
        slots = self._files.read().options.slots
        ready = {node["metadata"]["name"] for node in found["items"] if is_ready(node, slots)}
        if since is not None:
            leases = server.get("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases") or {"items": []}
            renewed = {lease["metadata"]["name"]: lease["spec"]["renewTime"] for lease in leases["items"]}
            ready &= {name for name, when in renewed.items() if datetime.fromisoformat(when) > since}
        return set(names) - ready

    def _start(self, name: str) -> None:
        node = self._node(name)
        record = NodeRecord(node.index, NodePhase.STARTING, node.start())
        self._files.update(lambda state: state.with_node(name, record))

    def _connect(self, name: str) -> None:
        """Give a node that was started its network; its services start when they see it."""
        node, record = self._node(name), self._record(name)
        assert record.outer is not None  # it was started
        inner = node.wait_inner(record.outer)
        self._connect_to_network(node, inner.pid)
        connected = replace(record, inner=inner, phase=NodePhase.UP)
        self._files.update(lambda state: state.with_node(name, connected))

    def _connect_to_network(self, node: Node, pid: int) -> None:
        """Wire the node; each node knows the way to all others' pods, so the others are told about this one's."""
        others = {name: record for name, record in self._files.read().nodes.items() if name != node.name}
        network.connect_node(node.addressing, node.index, pid, [record.index for record in others.values()])
        for record in others.values():
            # A node that is still to be connected learns all ways then.
            if record.phase in (NodePhase.UP, NodePhase.PARTITIONED) and record.inner and record.inner.is_alive():
                network.add_pod_route(node.addressing, node.index, record.inner.pid)

    def _record(self, name: str) -> NodeRecord:
        nodes = self._files.read().nodes
        if name not in nodes:
            raise LocalClusterError(f"there is no node {name!r}; there are: {', '.join(nodes) or 'none'}")
        return nodes[name]

    def _demand(self, name: str, change: str) -> NodeRecord:
        record = self._record(name)
        if record.phase not in ALLOWED[change]:
            allowed = " or ".join(sorted(ALLOWED[change]))
            raise LocalClusterError(f"{name} is {record.phase}; `node {change}` needs a node that is {allowed}")
        return record

    def _set_phase(self, name: str, phase: NodePhase) -> None:
        self._files.update(lambda state: state.with_node(name, replace(state.nodes[name], phase=phase)))

    def _node(self, name: str) -> Node:
        return Node(self._files.folder, name, self._record(name).index, self._control_plane.addressing)

    def _kubectl(self, *arguments: str, deadline_s: float) -> str:
        config = f"--kubeconfig={self._control_plane.kubeconfig}"
        return run([self._control_plane.programs["kubectl"], config, *arguments], timeout_s=deadline_s).stdout


def is_ready(node: dict[str, Any], slots: int) -> bool:
    """Tell whether a Node object says that the node is Ready and offers its slots."""
    status = node.get("status", {})
    if slots and status.get("capacity", {}).get(SLOT_RESOURCE) != str(slots):
        return False
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in status.get("conditions", []))


def _processes(record: NodeRecord) -> list[ProcessId]:
    return [process for process in (record.inner, record.outer) if process is not None]
