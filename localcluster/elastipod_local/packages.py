"""The Debian packages that nodes need: containerd, runc, CNI plugins and the like."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from elastipod_local.errors import LocalClusterError, UnsupportedError
from elastipod_local.host import Progress, find_program, quiet, run_logged, tail_of
from elastipod_local.paths import cache_dir

INSTALL_DEADLINE_S = 900

# What is looked for -> the package that brings it.
NEEDED = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/usr/lib/cni/portmap": "containernetworking-plugins",
    "debootstrap": "debootstrap",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "gcc": "gcc",
    "/usr/lib/*-linux-gnu/libc.a": "libc6-dev",
}


def missing_packages() -> list[str]:
    """Give the packages that bring what this machine lacks."""
    return sorted({package for wanted, package in NEEDED.items() if not _is_there(wanted)})


def _is_there(wanted: str) -> bool:
    if wanted.startswith("/"):
        return any(Path("/").glob(wanted.removeprefix("/")))
    return find_program(wanted) is not None


def require_installable(missing: Sequence[str]) -> None:
    """Raise UnsupportedError where packages are missing and there is no apt to bring them."""
    if missing and shutil.which("apt-get") is None:
        raise UnsupportedError(
            f"nodes need {', '.join(missing)} (names of Debian packages) and this machine has no apt-get; "
            "install them by other means, or use --nodes 0"
        )


def ensure_packages(progress: Progress = quiet) -> None:
    """Install with apt what is missing. Raises UnsupportedError where there is no apt, LocalClusterError if apt fails."""
    missing = missing_packages()
    if not missing:
        return
    require_installable(missing)
    log = cache_dir() / "apt.log"
    progress(f"installing Debian packages: {' '.join(missing)} (log: {log})")
    _apt(["update", "-q"], log)
    _apt(["install", "-q", "--yes", "--no-install-recommends", *missing], log)
    if still := missing_packages():
        raise LocalClusterError(f"apt-get installed {', '.join(still)}, but what they should bring is not there")


def _apt(arguments: list[str], log: Path) -> None:
    with log.open("ab") as output:
        status = run_logged(
            ["apt-get", *arguments],
            output,
            what=f"`apt-get {arguments[0]}`",
            timeout_s=INSTALL_DEADLINE_S,
            env={"DEBIAN_FRONTEND": "noninteractive"},
        )
    if status != 0:
        raise LocalClusterError(f"`apt-get {arguments[0]}` failed: {tail_of(log)}")
