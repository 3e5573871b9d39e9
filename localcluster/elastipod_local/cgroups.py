"""Control groups of nodes, on machines with the old hierarchies (v1, also beside an empty v2) and with v2 alone.

A node's group is `<root of hierarchy>/<cluster>/<node>` in each hierarchy; inside the node it appears as the root.
"""

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elastipod_local.errors import LocalClusterError, UnsupportedError

MOUNTS = Path("/proc/mounts")
V2_CONTROLLERS = ("cpu", "cpuset", "io", "memory", "pids", "hugetlb")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted hierarchy. options: what a second mount of it needs, e.g. 'cpu,cpuacct' or 'none,name=systemd'."""

    mount_point: Path
    kind: str  # cgroup or cgroup2
    options: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The machine's hierarchies; `unified` is true when v2 alone does the work."""

    hierarchies: tuple[Hierarchy, ...]

    @property
    def unified(self) -> bool:
        return all(hierarchy.kind == "cgroup2" for hierarchy in self.hierarchies)


def parse_mounts(mounts: str) -> Layout:
    """Find the hierarchies below /sys/fs/cgroup in the text of /proc/mounts."""
    found: dict[Path, Hierarchy] = {}
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        if kind in ("cgroup", "cgroup2") and point.startswith("/sys/fs/cgroup"):
            found[Path(point)] = Hierarchy(Path(point), kind, _mount_options(kind, options.split(",")))
    return Layout(tuple(found.values()))


def _mount_options(kind: str, options: list[str]) -> str:
    if kind == "cgroup2":
        return ""
    named = [option for option in options if option.startswith("name=")]
    if named:
        return f"none,{named[0]}"
    general = {"rw", "ro", "nosuid", "nodev", "noexec", "relatime", "xattr", "clone_children", "release_agent"}
    return ",".join(option for option in options if option not in general and "=" not in option)


def machine_layout() -> Layout:
    """Give this machine's hierarchies. Raises LocalClusterError when there are none."""
    layout = parse_mounts(MOUNTS.read_text())
    if not layout.hierarchies:
        raise LocalClusterError("no control groups are mounted below /sys/fs/cgroup; nodes cannot be made without them")
    return layout


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The control groups of one node, or of a whole cluster when `path` is the cluster's name alone."""

    layout: Layout
    path: str

    def folders(self) -> list[Path]:
        return [hierarchy.mount_point / self.path for hierarchy in self.layout.hierarchies]

    def create(self) -> None:
        """Make the groups, empty: what a crash left inside is removed first (it costs kubelet seconds per pod).

        Raises LocalClusterError where this machine does not let us, as in a container that was not started for it.
        """
        self.remove_children()
        try:
            self._create()
        except OSError as refused:
            raise LocalClusterError(
                f"control groups of nodes cannot be made ({refused}); start the container with "
                "--privileged, or run on a machine of its own"
            ) from refused

    def _create(self) -> None:
        for hierarchy, folder in zip(self.layout.hierarchies, self.folders(), strict=True):
            current = hierarchy.mount_point
            for part in Path(self.path).parts:
                if self.layout.unified:
                    _enable_controllers(current)
                current = current / part
                current.mkdir(exist_ok=True)
                _inherit_cpuset(current)
            assert current == folder

    def join_files(self) -> list[Path]:
        """Give the files to which a process writes its own pid to move in."""
        return [folder / "cgroup.procs" for folder in self.folders()]

    def set_apart(self, pid: int) -> None:
        """Under v2, move a process that belongs to the node but stays outside of its namespaces into a group beside.

        There a group with processes of its own cannot share out its controllers to the pods below it.
        """
        if self.layout.unified:
            (folder,) = self._beside.folders()
            folder.mkdir(exist_ok=True)
            (folder / "cgroup.procs").write_text(str(pid))

    @property
    def _beside(self) -> "NodeGroup":
        return NodeGroup(self.layout, f"{self.path}-outer")

    def freeze(self, *, frozen: bool) -> None:
        """Stop or continue every process of the node at once."""
        for folder in self.folders():
            if (folder / "freezer.state").exists():
                (folder / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
                return
            if self.layout.unified and (folder / "cgroup.freeze").exists():
                (folder / "cgroup.freeze").write_text("1" if frozen else "0")
                return
        if frozen:
            raise LocalClusterError("this machine's control groups have no freezer; a node cannot be frozen here")

    def processes(self) -> Iterator[int]:
        """Give the pids in the groups and below."""
        for folder in self.folders():
            for group in (folder, *_below(folder)):
                try:
                    yield from (int(line) for line in (group / "cgroup.procs").read_text().split())
                except FileNotFoundError:
                    continue  # the group went away while we looked

    def remove(self, *, deadline_s: float = 20) -> None:
        """Remove the groups and all below; waits for dying processes. Raises LocalClusterError when some stay."""
        for group in (self, self._beside):
            group._sweep(lambda folder: [*_below(folder), folder], deadline_s)

    def remove_children(self, *, deadline_s: float = 20) -> None:
        """Remove all groups below these."""
        self._sweep(_below, deadline_s)

    def _sweep(self, select: Callable[[Path], list[Path]], deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while left := [group for folder in self.folders() if folder.exists() for group in select(folder)]:
            for group in left:
                try:
                    group.rmdir()
                except FileNotFoundError:
                    continue  # removed in the meantime
                except OSError as busy:  # a process in it is still dying
                    if time.monotonic() > end:
                        raise LocalClusterError(f"the control group {group} cannot be removed: {busy}") from busy
            time.sleep(0.02)


def _below(folder: Path) -> list[Path]:
    """Give the groups below, deepest first, so that they can be removed in this order."""
    return [Path(above, name) for above, names, _ in os.walk(folder, topdown=False) for name in names]


def _enable_controllers(folder: Path) -> None:
    """Let a group share out its controllers to the groups below it.

    All at once: one by one the kernel would grant processors to a group that holds processes, and refuse all else for good.
    """
    wanted = _to_share(folder)
    if not wanted:
        return
    try:
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{controller}" for controller in wanted))
    except OSError as refused:
        if refused.errno not in (errno.EBUSY, errno.EOPNOTSUPP):
            raise
        raise LocalClusterError(_cannot_share(folder, wanted)) from refused


def _to_share(folder: Path) -> list[str]:
    available = (folder / "cgroup.controllers").read_text().split()
    return [controller for controller in V2_CONTROLLERS if controller in available]


def _cannot_share(folder: Path, controllers: Iterable[str]) -> str:
    return (
        f"the control group {folder} cannot share out {', '.join(controllers)}, because it holds processes of its own; "
        "move them into a group below it first, or start the container with --cgroupns=host"
    )


def require_shareable(layout: Layout) -> None:
    """Raise UnsupportedError where the root group that we see can share out nothing, as in a container; changes nothing.

    Under v2 the root of a cgroup namespace is an ordinary group: while it holds processes, those below get no controllers.
    The machine's own root is none of those, and has no type.
    """
    if not layout.unified:
        return
    for root in (hierarchy.mount_point for hierarchy in layout.hierarchies):
        if not (root / "cgroup.type").exists():
            continue
        shared = (root / "cgroup.subtree_control").read_text().split()
        lacking = [controller for controller in _to_share(root) if controller not in shared]
        if lacking and (root / "cgroup.procs").read_text().split():
            raise UnsupportedError(_cannot_share(root, lacking))


def require_control_groups() -> None:
    """Raise LocalClusterError, or its UnsupportedError, where this machine's control groups cannot hold nodes."""
    require_shareable(machine_layout())


def _inherit_cpuset(folder: Path) -> None:
    """A new v1 cpuset group takes no process before it is told its CPUs and memory nodes."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        mine, above = folder / name, folder.parent / name
        if mine.exists() and above.exists() and not mine.read_text().strip():
            mine.write_text(above.read_text())
