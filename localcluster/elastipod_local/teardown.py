"""Ends a cluster, found from its state file and from the kernel, even if the process that created it crashed."""

from pathlib import Path

from elastipod_local import network
from elastipod_local.addressing import Addressing
from elastipod_local.cgroups import NodeGroup, machine_layout
from elastipod_local.host import Progress, delete_tree, is_root, quiet, require_root, run
from elastipod_local.processes import kill_all_tagged, kill_if_tagged, tagged
from elastipod_local.state import ClusterState, StateFile, exclusive

KEPT = {"logs", "lock"}


def tear_down(files: StateFile, progress: Progress = quiet) -> bool:
    """End every process, link, control group and mount of the cluster and delete its folder, but for its logs.

    Hold the cluster's lock. Gives False when there was nothing. Safe to repeat and to interrupt: the state is deleted
    last, so that the next call continues. Raises LocalClusterError naming what cannot be removed.
    """
    state = files.load()
    found = state is not None or next(tagged(files.folder), None) is not None
    if state is not None and state.addressing.block is not None:
        require_root("taking down a cluster that root brought up")
        with exclusive(network.ALLOCATION_LOCK, wait_s=network.ALLOCATION_WAIT_S, progress=progress):
            _end_with_block(files.folder, state.addressing)
    else:
        kill_all_tagged(files.folder)
    _unmount_below(files.folder)
    _empty(files.folder)
    files.remove()
    if found:
        progress(f"the cluster is gone; its logs are kept in {files.folder / 'logs'}")
    return found


def _end_with_block(folder: Path, addressing: Addressing) -> None:
    """End a cluster that has a bridge and control groups of its own.

    They are only touched while the bridge is ours: after a crash at the wrong moment another cluster may own the block.
    """
    ours = network.owns_bridge(addressing, folder)
    group = NodeGroup(machine_layout(), addressing.kernel_name)
    for pid in tagged(folder):
        kill_if_tagged(pid, folder)
    if ours:
        thaw_all(group)  # a frozen process takes even SIGKILL only once it is thawed
    kill_all_tagged(folder)
    if ours:
        group.remove()
        network.delete_bridge(addressing)


def thaw_all(cluster: NodeGroup) -> None:
    """Thaw every node below a cluster's group."""
    names = {
        entry.name for folder in cluster.folders() if folder.is_dir() for entry in folder.iterdir() if entry.is_dir()
    }
    for name in names:
        NodeGroup(cluster.layout, f"{cluster.path}/{name}").freeze(frozen=False)


def _unmount_below(folder: Path) -> None:
    """Detach what is still mounted below the folder; nodes mount in namespaces of their own, so there is nothing."""
    if not is_root():
        return
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for point in reversed([point for point in points if Path(point).is_relative_to(folder)]):
        run(["umount", "--lazy", point])


def _empty(folder: Path) -> None:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.name in KEPT or entry.name == "state.json":
            continue
        delete_tree(entry)


def is_running(state: ClusterState) -> bool:
    """Tell whether the control plane that is written down lives."""
    return bool(state.control_plane) and all(process.is_alive() for process in state.control_plane.values())
