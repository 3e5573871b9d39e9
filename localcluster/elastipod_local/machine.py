"""Whether this machine can have nodes at all: asked before anything is compiled, fetched or created."""

import tempfile
from pathlib import Path

from elastipod_local.cgroups import require_control_groups
from elastipod_local.errors import UnsupportedError
from elastipod_local.host import find_program, last_lines, require_root, run
from elastipod_local.node import NAMESPACES
from elastipod_local.packages import missing_packages, require_installable
from elastipod_local.paths import cache_dir, clusters_dir, require_visible_to_nodes


def require_nodes_possible(clusters: Path | None = None) -> None:
    """Raise LocalClusterError with one sentence where no node can be created; changes nothing, and takes well below a second.

    clusters: the folder that holds the cluster's own, that of this checkout by default. UnsupportedError stands for another
    machine or another user, the others for a setting.
    """
    require_root("creating nodes")
    require_namespaces()
    require_visible_to_nodes(cache_dir())
    require_control_groups()
    for folder in (cache_dir(), clusters or clusters_dir()):
        require_overlay(folder)
    require_installable(missing_packages())


def require_namespaces() -> None:
    """Raise UnsupportedError where even root gets no namespaces, as in most containers."""
    if find_program("unshare") is None:
        return  # a package will bring it
    tried = run(["unshare", *NAMESPACES, "--fork", "true"], check=False)
    if tried.returncode != 0:
        raise UnsupportedError(
            f"nodes are made of Linux namespaces, and here even root gets none ({last_lines(tried.stderr, 1)}); "
            "run it on a machine of its own, in a virtual machine, or in a container that is started with --privileged"
        )


def require_overlay(folder: Path) -> None:
    """Raise UnsupportedError where a folder cannot hold the changes of an overlay, as on the root of most containers.

    Images are built in overlays in the cache, and pods run in overlays in the cluster's folder. The folder may be missing.
    """
    if find_program("unshare") is None or find_program("mount") is None:
        return  # a package will bring it
    above = next(one for one in (folder, *folder.absolute().parents) if one.is_dir())
    with tempfile.TemporaryDirectory(dir=above, prefix=".elastipod-overlay-") as scratch:
        for name in ("lower", "upper", "work", "merged"):
            Path(scratch, name).mkdir()
        # Relative: colons and commas of a path would be read as options.
        layers = "lowerdir=lower,upperdir=upper,workdir=work"
        command = ["unshare", "--mount", "--", "mount", "-t", "overlay", "-o", layers, "elastipod", "merged"]
        tried = run(command, check=False, cwd=Path(scratch))
    if tried.returncode != 0:
        raise UnsupportedError(
            f"{folder} is on a file system that takes no overlay ({tried.stderr.partition(chr(10))[0]}), and nodes are made of "
            f"them; in a container, mount a volume there (docker run --volume NAME:{folder} ...)"
        )
