"""Root folders that images start from, made on this machine: a Debian, and the pause program."""

import shutil
from pathlib import Path

from elastipod_local.errors import LocalClusterError
from elastipod_local.host import Progress, find_program, run, run_logged, tail_of
from elastipod_local.paths import PACKAGE
from elastipod_local.processes import isolated

DEBIAN = "debian:bookworm-slim"
RELEASE = "bookworm"
BOOTSTRAP_DEADLINE_S = 1200


def bootstrap_debian(scratch: Path, progress: Progress) -> Path:
    """Make a minimal Debian and give its folder, below scratch. Raises LocalClusterError when the mirror fails."""
    root, log = scratch / "debian", scratch / "debootstrap.log"
    shutil.rmtree(root, ignore_errors=True)
    progress(f"  bootstrapping Debian {RELEASE} (once; log: {log})")
    with log.open("wb") as output:
        status = run_logged(
            # In namespaces of its own, so that what it mounts and starts cannot stay behind.
            isolated(["debootstrap", "--variant=minbase", RELEASE, str(root), *mirror()]),
            output,
            what="debootstrap",
            timeout_s=BOOTSTRAP_DEADLINE_S,
        )
    if status != 0:
        raise LocalClusterError(f"debootstrap failed: {tail_of(log)}; log: {log}")
    _slim(root)
    return root


def mirror() -> list[str]:
    """Give the mirror that this machine's apt uses for the release; nothing where it uses none, for debootstrap knows one."""
    if find_program("apt-get") is None:
        return []
    targets = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME) $(COMPONENT)"], check=False).stdout
    for line in targets.splitlines():
        uri, _, rest = line.partition(" ")
        if rest == f"{RELEASE} main":
            return [uri.rstrip("/")]
    return []


def _slim(root: Path) -> None:
    """Delete what the slim images leave out as well, and what belongs to this machine and not to an image."""
    for pattern in ("usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*", "var/cache/apt/archives/*.deb"):
        _delete(root, pattern)
    for pattern in ("var/lib/apt/lists/*", "var/log/*.log", "dev/*", "run/*", "tmp/*"):
        _delete(root, pattern)
    for name in ("etc/resolv.conf", "etc/hostname"):
        (root / name).write_text("")


def _delete(root: Path, pattern: str) -> None:
    for path in root.glob(pattern):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def compile_pause(scratch: Path) -> Path:
    """Compile the pause program and give the folder that holds it alone."""
    root = scratch / "pause"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    run(["gcc", "-O2", "-s", "-static", "-o", root / "pause", PACKAGE / "c" / "pause.c"])
    (root / "pause").chmod(0o755)  # its user is not root
    return root
