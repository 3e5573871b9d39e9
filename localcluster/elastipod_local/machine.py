"""Whether this machine can have nodes at all: asked before anything is compiled, fetched or created."""

from elastipod_local.errors import UnsupportedError
from elastipod_local.host import find_program, last_lines, require_root, run
from elastipod_local.node import NAMESPACES
from elastipod_local.packages import missing_packages, require_installable
from elastipod_local.paths import cache_dir, require_visible_to_nodes


def require_nodes_possible() -> None:
    """Raise LocalClusterError with one sentence where no node can be created; changes nothing, and takes well below a second.

    UnsupportedError stands for another machine or another user, the others for a setting.
    """
    require_root("creating nodes")
    require_namespaces()
    require_visible_to_nodes(cache_dir())
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
