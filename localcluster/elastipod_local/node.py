"""One node on this machine: its files, its control groups and its processes."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastipod_local import node_config, pki
from elastipod_local.addressing import Addressing
from elastipod_local.cgroups import NodeGroup, machine_layout
from elastipod_local.controlplane import ControlPlane
from elastipod_local.errors import LocalClusterError
from elastipod_local.host import delete_tree, run, tail_of, wait_until
from elastipod_local.oci import Image
from elastipod_local.paths import PACKAGE, cache_dir
from elastipod_local.processes import ProcessId, kill_if_tagged, reap, spawn
from elastipod_local.seed import copy_seed, import_image
from elastipod_local.state import NodeOptions

NAMESPACES = ("--net", "--mount", "--pid", "--uts", "--ipc", "--cgroup")
START_DEADLINE_S = 30
END_DEADLINE_S = 30

# Moves itself into the control groups named before `--`, so that the cgroup namespace made next has them as its root.
ENTER_GROUPS = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit 1; shift; done; shift; exec "$@"'


@dataclass(frozen=True, slots=True)
class Disk:
    """What nodes start from: a containerd folder with images, and the shared Python environment."""

    seed: Path
    site_packages: Path


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster in `cluster_folder`; its own folder survives a power loss and goes with `delete`."""

    cluster_folder: Path
    name: str
    index: int
    addressing: Addressing

    @property
    def folder(self) -> Path:
        return self.cluster_folder / "nodes" / self.name

    @property
    def logs(self) -> Path:
        """Folder of the node's logs, kept when the node is gone: its own services' and its containers'."""
        return self.cluster_folder / "logs" / self.name

    @property
    def log(self) -> Path:
        return self.logs / "init.log"

    @property
    def group(self) -> NodeGroup:
        return NodeGroup(machine_layout(), f"{self.addressing.kernel_name}/{self.name}")

    def prepare(self, control_plane: ControlPlane, options: NodeOptions, disk: Disk) -> None:
        """Write the node's disk: certificates, configuration, images. A node that returns keeps what it has."""
        for name in node_config.NODE_FOLDERS:
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(parents=True, exist_ok=True)
        if not any((self.folder / "containerd").iterdir()):
            copy_seed(disk.seed, self.folder / "containerd")
        etc = self.folder / "etc"
        if not (etc / "kubelet.kubeconfig").exists():
            self._issue_certificates(control_plane, etc)
        files = {
            etc / "kubelet.json": node_config.kubelet(
                self.addressing, self.index, options, cpus=os.cpu_count() or 1, memory_mib=_machine_memory_mib()
            ),
            etc / "containerd.toml": node_config.containerd(),
            etc / "base-spec.json": node_config.base_spec(run(["ctr", "oci", "spec"]).stdout, disk.site_packages),
            etc / "resolv.conf": f"nameserver {self.addressing.api_address}\n",
            etc / "init.json": self._init_config(control_plane.programs, options, disk).encode(),
            self.folder / "cni-config" / "10-elastipod.conflist": node_config.cni(self.addressing, self.index),
        }
        for path, content in files.items():
            path.write_text(content)

    def _issue_certificates(self, control_plane: ControlPlane, etc: Path) -> None:
        authority = control_plane.authority
        user = f"system:node:{self.name}"
        client = authority.issue(f"{self.name}-client", user, group="system:nodes")
        server = authority.issue(self.name, user, serves=[self.addressing.node_address(self.index), self.name])
        copies = {
            authority.certificate: "ca.crt",
            server.certificate: "kubelet.crt",
            server.key: "kubelet.key",
            client.certificate: "kubelet-client.crt",
            client.key: "kubelet-client.key",
            control_plane.pki_dir / "kube-proxy.kubeconfig": "kube-proxy.kubeconfig",
        }
        for source, name in copies.items():
            pki.write_private(etc / name, source.read_bytes())
        pki.write_kubeconfig(
            etc / "kubelet.kubeconfig",
            server=self.addressing.api_url,
            authority=authority,
            client=client,
            cluster=control_plane.name,
        )

    def _init_config(self, programs: Mapping[str, Path], options: NodeOptions, disk: Disk) -> node_config.InitConfig:
        visible = {Path(sys.prefix), Path(sys.base_prefix), PACKAGE.parent, cache_dir(), disk.site_packages}
        visible |= {program.parent for program in programs.values()}
        return node_config.InitConfig(
            node=self.name,
            folder=str(self.folder),
            logs=str(self.logs),
            shared=str(self.cluster_folder / "shared"),
            visible=tuple(str(path) for path in sorted(visible) if str(path) not in ("/", "/usr")),
            cgroups=tuple((str(h.mount_point), h.kind, h.options) for h in machine_layout().hierarchies),
            commands=node_config.services(self.name, dict(programs), self.addressing, self.index, options.slots),
        )

    def start(self) -> ProcessId:
        """Start the process that makes the namespaces and, in them, process 1; it waits there for its network."""
        group = self.group
        group.create()
        return spawn(
            [
                *("sh", "-c", ENTER_GROUPS, "enter-groups", *map(str, group.join_files()), "--"),
                *("unshare", *NAMESPACES, "--fork", "--kill-child", "--"),
                *(sys.executable, "-m", "elastipod_local.node_init", f"{self.folder}/etc/init.json"),
            ],
            owner=self.cluster_folder,
            log=self.log,
            env={"PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def wait_inner(self, outer: ProcessId) -> ProcessId:
        """Give process 1 of the node once it runs in namespaces of its own."""

        def inner() -> ProcessId | None:
            if not outer.is_alive():
                raise LocalClusterError(f"{self.name} ended at its start: {tail_of(self.log)}")
            children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            return ProcessId.of(int(children[0])) if children else None

        hint = f"log: {self.log}"
        found = wait_until(inner, deadline_s=START_DEADLINE_S, what=f"process 1 of {self.name}", hint=hint)
        self.group.set_apart(outer.pid)
        return found

    def end(self, processes: list[ProcessId]) -> None:
        """Cut the power: every process of the node dies at once. Returns when all are gone and its groups are empty."""
        for process in processes:
            if process.is_alive():
                kill_if_tagged(process.pid, self.cluster_folder)
        group = self.group
        group.freeze(frozen=False)  # a frozen process dies only once it is thawed

        def gone() -> bool:
            reap()
            return not any(group.processes())

        wait_until(gone, deadline_s=END_DEADLINE_S, what=f"the processes of {self.name} to be gone")
        group.remove()

    def delete(self) -> None:
        """Delete the node's disk; its logs stay."""
        delete_tree(self.folder)

    def import_images(self, inner: ProcessId, images: Iterable[Image]) -> None:
        """Import images into the node's containerd; only layers that it lacks are carried over."""
        tar = self.folder / "etc" / "image.tar"
        enter = ["nsenter", f"--target={inner.pid}", "--mount", "--net", "--"]
        command = [*enter, "ctr", "--namespace", "k8s.io", "images", "import", f"{node_config.ETC}/image.tar"]
        try:
            for image in images:
                import_image(image, self.folder / "containerd", tar, command)
        finally:
            tar.unlink(missing_ok=True)


def _machine_memory_mib() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
