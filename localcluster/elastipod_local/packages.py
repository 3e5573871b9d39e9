"""The Debian packages that nodes need: containerd, runc, CNI plugins and the like."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from elastipod_local.errors import LocalClusterError, UnsupportedError
from elastipod_local.host import Progress, Reminder, find_program, last_lines, quiet, run_logged
from elastipod_local.paths import cache_dir

INSTALL_DEADLINE_S = 900
LOCK_WAIT_S = 600  # for another apt: a machine's nightly upgrade takes minutes
LOCK_POLL_S = 2.0
LOCKED = "Could not get lock"
REPORT_EVERY_S = 30.0

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
    """Install with apt what is missing. Raises UnsupportedError where there is no apt, LocalClusterError if it cannot install.

    Lists that cannot be refreshed, as with one third-party source that is stale, are told only then.
    """
    missing = missing_packages()
    if not missing:
        return
    require_installable(missing)
    log = cache_dir() / "apt.log"
    progress(f"installing Debian packages: {' '.join(missing)} (log: {log})")
    stale = _apt(["update", "-q"], log, progress)
    if refused := _apt(["install", "-q", "--yes", "--no-install-recommends", *missing], log, progress):
        before = f"; `apt-get update` had failed before: {stale}" if stale else ""
        raise LocalClusterError(f"`apt-get install` failed: {refused}{before}")
    if still := missing_packages():
        raise LocalClusterError(f"apt-get installed {', '.join(still)}, but what they should bring is not there")


def _apt(arguments: list[str], log: Path, progress: Progress) -> str:
    """Run apt-get, once nobody else holds its locks; give its last words if it failed, '' otherwise."""
    reminder = Reminder(progress, every_s=REPORT_EVERY_S, first_s=0)
    end = time.monotonic() + LOCK_WAIT_S
    while True:
        before = log.stat().st_size if log.exists() else 0
        try:
            status = _run_apt(arguments, log)
        except LocalClusterError as late:
            return str(late)
        said = log.read_bytes()[before:].decode(errors="replace")
        if status == 0:
            return ""
        if LOCKED not in said or time.monotonic() > end:
            return last_lines(said, 5) or f"exit code {status}"
        reminder.remind("  waiting for another program that uses apt")
        time.sleep(LOCK_POLL_S)


def _run_apt(arguments: list[str], log: Path) -> int:
    with log.open("ab") as output:
        return run_logged(
            ["apt-get", *arguments],
            output,
            what=f"`apt-get {arguments[0]}`",
            timeout_s=INSTALL_DEADLINE_S,
            env={"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        )
