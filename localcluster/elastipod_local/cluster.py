"""A cluster: start it, inspect it, change its nodes, take it down. The command line, the demo and tests use this."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import SystemRandom
from types import TracebackType

from elastipod_local import binaries, network, ports, versions
from elastipod_local.addressing import RANGE, Addressing
from elastipod_local.api import ApiServer
from elastipod_local.cgroups import NodeGroup, machine_layout
from elastipod_local.controlplane import API_SERVER_FLAGS, KUEUE, ControlPlane
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import (
    Progress,
    delete_tree,
    is_root,
    quiet,
    require_linux,
    require_root,
    run,
    signals_ignored,
    without_proxy,
)
from elastipod_local.images import ImageSet, ensure_images, stored_seed
from elastipod_local.kueue import Kueue
from elastipod_local.kueue_config import KueueOptions
from elastipod_local.machine import require_nodes_possible
from elastipod_local.node import Disk
from elastipod_local.node_config import SICK_MARK
from elastipod_local.nodes import Nodes
from elastipod_local.packages import ensure_packages
from elastipod_local.paths import DEFAULT_NAME, cluster_dir
from elastipod_local.prepare import prepare
from elastipod_local.roles import Roles
from elastipod_local.state import ClusterState, NodeOptions, Phase, StateFile, exclusive
from elastipod_local.storage import shared_storage
from elastipod_local.teardown import is_running, tear_down

CHANGE_WAIT_S = 180  # for another change of the same cluster
DEFAULT_OPTIONS = NodeOptions()
DEFAULT_KUEUE = KueueOptions()


class Cluster:
    """A local cluster in its folder, from `up` or `attach`; as a context manager it is taken down at the end.

    Every method that changes something holds the cluster's lock, records what it is about to create, and raises
    LocalClusterError with one sentence if it fails.
    """

    def __init__(self, name: str, folder: Path, progress: Progress = quiet) -> None:
        self.name = name
        self.folder = folder
        self._progress = progress
        self._files = StateFile(folder)

    # --- using it ---

    @property
    def kubeconfig(self) -> Path:
        """Path of the administrator's kubeconfig (mode 0600, certificates included)."""
        return self.folder / "kubeconfig"

    @property
    def shared(self) -> Path:
        """Folder on this machine that every node sees as /mnt/shared."""
        return self.folder / "shared"

    def kubectl(self, *arguments: str, input: str | None = None, check: bool = True, timeout_s: float = 300) -> str:
        """Run kubectl as the cluster's administrator and give what it printed to stdout.

        Raises CommandError with kubectl's own words when it fails, unless check is False.
        """
        command: list[str | Path] = [binaries.ensure(["kubectl"])["kubectl"], *arguments]
        return run(command, input=input, check=check, timeout_s=timeout_s, env=self.environment()).stdout

    def helm(self, *arguments: str, input: str | None = None, check: bool = True, timeout_s: float = 600) -> str:
        """Run helm as the cluster's administrator; as `kubectl`. Its caches stay in the cluster's folder."""
        command: list[str | Path] = [binaries.ensure(["helm"], self._progress)["helm"], *arguments]
        return run(command, input=input, check=check, timeout_s=timeout_s, env=self.environment()).stdout

    def environment(self) -> dict[str, str]:
        """Give the variables that make kubectl and helm talk to this cluster, past the proxy that ours may name."""
        folders = {
            f"HELM_{kind}_HOME": str(self.folder / "helm" / kind.lower()) for kind in ("CACHE", "CONFIG", "DATA")
        }
        return {"KUBECONFIG": str(self.kubeconfig), **folders, **without_proxy(os.environ)}

    @property
    def api_server(self) -> ApiServer:
        """The API server, called as the administrator without a process for each call."""
        return ControlPlane(self.folder, self.name, self.state().addressing, {}).api_server

    def state(self) -> ClusterState:
        """Give what is written down. Raises LocalClusterError when there is no such cluster."""
        state = self._files.load()
        if state is None:
            raise LocalClusterError(
                f"there is no cluster {self.name!r}; `elastipod local up --name {self.name}` creates it"
            )
        return state

    def is_running(self) -> bool:
        """Whether the cluster was started and its control plane runs."""
        state = self._files.load()
        return state is not None and state.phase is Phase.UP and is_running(state)

    # --- up and down ---

    @classmethod
    def up(
        cls,
        name: str = DEFAULT_NAME,
        *,
        nodes: int = 2,
        run_dir: Path | None = None,
        options: NodeOptions = DEFAULT_OPTIONS,
        kueue: KueueOptions | None = None,
        api_server_flags: Iterable[str] = (),
        progress: Progress = quiet,
    ) -> "Cluster":
        """Bring a cluster up and return when all its nodes are Ready. What a crashed run left is removed first.

        nodes: 0 gives a control plane alone, which needs no root (and without it listens on loopback). run_dir: folder
        of this one cluster. kueue: install Kueue as well. api_server_flags: beyond those that each cluster has. On any failure
        everything that was created is taken down again.
        Raises LocalClusterError when the cluster is up already, UnsupportedError where this machine or user cannot
        have one.
        """
        require_linux()
        cluster = cls(name, cluster_dir(name, run_dir), progress)
        if nodes:
            require_nodes_possible(cluster.folder.parent)
        with cluster._files.locked():
            if cluster.is_running():
                raise LocalClusterError(
                    f"the cluster {name!r} is up already ({cluster.folder}); use it or take it down"
                )
            tear_down(cluster._files, lambda _: progress("removed what an earlier run had left"))
            delete_tree(cluster.folder / "logs")
            ports.require_free(ports.of_cluster(with_kueue=kueue is not None))
            # The long part comes first: nothing of the cluster exists while it builds.
            images = prepare(_program_names(nodes, kueue), with_images=bool(nodes), progress=progress)
            (cluster.folder / API_SERVER_FLAGS).write_text("\n".join(api_server_flags))
            try:
                cluster._bring_up(nodes, images, options, kueue)
            except BaseException:
                progress("the start failed; taking down what was created")
                with signals_ignored():
                    tear_down(cluster._files)
                raise
        progress(f"the cluster {name!r} is up; export KUBECONFIG={cluster.kubeconfig}")
        return cluster

    @classmethod
    def attach(cls, name: str = DEFAULT_NAME, *, run_dir: Path | None = None, progress: Progress = quiet) -> "Cluster":
        """Give a cluster that another process brought up. Raises LocalClusterError when it does not run."""
        cluster = cls(name, cluster_dir(name, run_dir), progress)
        if not cluster.is_running():
            raise LocalClusterError(
                f"the cluster {name!r} is not running; `elastipod local up --name {name}` starts it"
            )
        return cluster

    def down(self) -> bool:
        """Take the cluster down, leaving nothing but its logs; False when there was nothing. Safe to repeat."""
        if not self.folder.exists():
            return False
        with signals_ignored(), self._files.locked(wait_s=CHANGE_WAIT_S, progress=self._progress):
            return tear_down(self._files, self._progress)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.down()

    # --- nodes ---

    def add_nodes(self, count: int = 1) -> list[str]:
        """Add nodes, all at once, and give their names when they are Ready."""
        with self._changing_nodes() as nodes:
            return nodes.add(count, self._disk())

    def remove_node(self, name: str, *, drain: bool = True) -> None:
        """Drain the node, delete its Node object, end it and delete its disk."""
        with self._changing_nodes() as nodes:
            nodes.remove(name, drain=drain)

    def drain_node(self, name: str, *, grace_period_s: int | None = None) -> None:
        """Cordon the node and evict its pods, as `kubectl drain --ignore-daemonsets`; returns when they are gone."""
        self._nodes().drain(name, grace_period_s=grace_period_s)  # changes nothing that is ours: no lock

    def kill_node(self, name: str) -> None:
        """Cut the node's power; its Node object stays, and its disk for `return_node`."""
        with self._changing_nodes() as nodes:
            nodes.kill(name)

    def return_node(self, name: str) -> None:
        """Switch a killed node on again; returns when it is Ready."""
        with self._changing_nodes() as nodes:
            nodes.bring_back(name, self._disk())

    def freeze_node(self, name: str) -> None:
        """Hang every process of the node, until `thaw_node`."""
        with self._changing_nodes() as nodes:
            nodes.freeze(name, frozen=True)

    def thaw_node(self, name: str) -> None:
        """Resume a frozen node."""
        with self._changing_nodes() as nodes:
            nodes.freeze(name, frozen=False)

    def partition_node(self, name: str) -> None:
        """Cut the node's network, until `heal_node`; its pods keep running."""
        with self._changing_nodes() as nodes:
            nodes.partition(name, cut=True)

    def heal_node(self, name: str) -> None:
        """Restore the network of a partitioned node."""
        with self._changing_nodes() as nodes:
            nodes.partition(name, cut=False)

    def set_sick(self, name: str, *, sick: bool) -> None:
        """Make a unit of the node's accelerator sick, or cure it, and label the node as HyperPod's health monitoring does."""
        health = "UnschedulablePendingReplacement" if sick else "Schedulable"
        self.kubectl("label", "node", name, "--overwrite", f"sagemaker.amazonaws.com/node-health-status={health}")
        mark = self.folder / "nodes" / name / "etc" / SICK_MARK
        mark.touch() if sick else mark.unlink(missing_ok=True)

    def load_images(self) -> None:
        """Build the images of the checkout as it is now and import what changed into every running node."""
        with self._changing_nodes() as nodes:
            found = self._images()
            nodes.import_images(found.images)
            self._files.update(lambda state: replace(state, images=found.key))

    # --- Kueue ---

    def add_kueue(self, options: KueueOptions = DEFAULT_KUEUE) -> None:
        """Install Kueue, or restart it with these options; returns when its webhooks answer.

        It runs as the role `kueue`, which can be frozen, killed and started. Raises LocalClusterError with the end of
        its log when it does not start.
        """
        ports.require_free(ports.of_cluster(with_kueue=True))
        self._programs(0, options)
        with self._files.locked(wait_s=CHANGE_WAIT_S, progress=self._progress):
            self._install_kueue(options)

    def _install_kueue(self, options: KueueOptions) -> None:
        state = self._files.update(lambda state: replace(state, kueue=options))
        control_plane = self._control_plane(state.addressing, nodes=state.addressing.block is not None)
        kueue = self._kueue(control_plane)
        self._progress(f"installing Kueue {versions.KUEUE_VERSION}")
        kueue.install(options)
        if (running := state.control_plane.get(KUEUE)) is not None and running.is_alive():
            Roles(self._files, control_plane).kill(KUEUE)
        self._start_role(control_plane, KUEUE)
        kueue.wait_ready(self.state().control_plane[KUEUE])

    def _kueue(self, control_plane: ControlPlane) -> Kueue:
        return Kueue(control_plane, self.kubectl, self.helm, binaries.kueue_chart(self._progress))

    # --- failures of the control plane ---

    def freeze_role(self, role: str) -> None:
        """Hang a role of the control plane (`kube-apiserver`, `etcd`, ...) until `thaw_role`: calls to it wait."""
        with self._changing_roles() as roles:
            roles.freeze(role)

    def thaw_role(self, role: str) -> None:
        """Resume a frozen role; does nothing if it is not frozen."""
        with self._changing_roles() as roles:
            roles.thaw(role)

    def kill_role(self, role: str) -> None:
        """End a role of the control plane with SIGKILL; returns when it is dead. `start_role` starts it again."""
        with self._changing_roles() as roles:
            roles.kill(role)

    def start_role(self, role: str) -> None:
        """Start a role that was killed; returns when the API server, or Kueue when it was that, is ready again."""
        with self._changing_roles() as roles:
            roles.start(role)
            if role == KUEUE:
                state = self.state()
                self._kueue(self._control_plane(state.addressing, nodes=False)).wait_ready(state.control_plane[KUEUE])

    @contextmanager
    def _changing_roles(self) -> Iterator[Roles]:
        with self._files.locked(wait_s=CHANGE_WAIT_S, progress=self._progress):
            addressing = self.state().addressing
            yield Roles(self._files, self._control_plane(addressing, nodes=addressing.block is not None))

    @contextmanager
    def _changing_nodes(self) -> Iterator[Nodes]:
        require_root("changing nodes")
        with self._files.locked(wait_s=CHANGE_WAIT_S, progress=self._progress):
            yield self._nodes()

    def _nodes(self) -> Nodes:
        addressing = self.state().addressing
        if addressing.block is None:
            raise LocalClusterError(f"the cluster {self.name!r} was brought up without root and cannot have nodes")
        return Nodes(self._files, self._control_plane(addressing, nodes=True), self._progress)

    # --- helpers ---

    def _programs(self, nodes: int, kueue: KueueOptions | None = None) -> dict[str, Path]:
        return binaries.ensure(_program_names(nodes, kueue), self._progress)

    def _images(self) -> ImageSet:
        ensure_packages(self._progress)
        return ensure_images(self._progress)

    def _disk(self) -> Disk:
        """Give what the cluster's nodes start from: the images that it was brought up with or that were loaded last."""
        stored = stored_seed(self.state().images)
        if stored is None:
            found = self._images()
            self._files.update(lambda state: replace(state, images=found.key))
            return Disk(found.seed, found.site_packages)
        return Disk(*stored)

    def _control_plane(self, addressing: Addressing, *, nodes: bool) -> ControlPlane:
        return ControlPlane(self.folder, self.name, addressing, self._programs(int(nodes), self.state().kueue))

    def _bring_up(self, nodes: int, images: ImageSet | None, options: NodeOptions, kueue: KueueOptions | None) -> None:
        addressing = self._take_addresses(options)
        self.shared.mkdir(exist_ok=True)
        self.shared.chmod(0o755)  # pods see it
        control_plane = self._control_plane(addressing, nodes=bool(nodes))
        control_plane.create_pki()
        self._progress("starting the control plane")
        for role in control_plane.commands():
            if role == "kube-controller-manager":
                # It gives up after 10 s without an API server, which a busy machine may well need.
                control_plane.wait_serving(self.state().control_plane)
            self._start_role(control_plane, role)
        control_plane.wait_ready(self.state().control_plane)
        if kueue is not None:
            self._install_kueue(kueue)
        if images is not None:
            self._files.update(lambda state: replace(state, images=images.key))
            Nodes(self._files, control_plane, self._progress).add(nodes, Disk(images.seed, images.site_packages))
            self.kubectl("apply", "-f", "-", input=shared_storage())
        self._files.update(lambda state: replace(state, phase=Phase.UP))

    def _start_role(self, control_plane: ControlPlane, role: str) -> None:
        process = control_plane.start(role)
        self._files.update(lambda state: state.with_process(role, process))

    def _take_addresses(self, options: NodeOptions) -> Addressing:
        """Choose free addresses, write them down, and make the bridge and the control groups that they name."""
        if not is_root():
            addressing = Addressing.on_loopback(SystemRandom())
            self._files.save(ClusterState(self.name, Phase.STARTING, addressing, options))
            return addressing
        with exclusive(network.ALLOCATION_LOCK, wait_s=network.ALLOCATION_WAIT_S, progress=self._progress):
            free = network.free_addressing()
            if not free:
                raise LocalClusterError(
                    f"all 16 address blocks for local clusters are in use ({RANGE}); take another cluster down, or delete "
                    "the route of this machine that covers them, such as a VPN's (`ip route show table all`)"
                )
            self._files.save(ClusterState(self.name, Phase.STARTING, free[0], options))
            network.create_bridge(free[0], self.folder)
            NodeGroup(machine_layout(), free[0].kernel_name).create()
        return free[0]


def _program_names(nodes: int, kueue: KueueOptions | None) -> list[str]:
    return [*binaries.CONTROL_PLANE, *(binaries.NODE if nodes else ()), *(binaries.KUEUE if kueue else ())]
