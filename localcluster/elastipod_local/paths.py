"""Where things are kept: the cache of everything that is built once, and the folder of a running cluster."""

import os
import re
from pathlib import Path

from elastipod_local.errors import LocalClusterError

PACKAGE = Path(__file__).resolve().parent
DEFAULT_NAME = "default"
NAME_PATTERN = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


def cache_dir() -> Path:
    """Give `$XDG_CACHE_HOME/elastipod` without links, made when missing. Raises LocalClusterError where it cannot be made.

    As the specification of that variable asks, a relative path is ignored.
    """
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (given if given.is_absolute() else Path.home() / ".cache") / "elastipod"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise LocalClusterError(
            f"the cache {folder} cannot be made ({refused.strerror}); set XDG_CACHE_HOME to a folder that can be written"
        ) from refused
    return folder.resolve()


def require_visible_to_nodes(folder: Path) -> None:
    """Raise LocalClusterError when nodes could not see a folder: each has a /tmp and a /run of its own."""
    for hidden in ("/tmp", "/run"):  # noqa: S108  # compared with, not written to
        if folder.resolve().is_relative_to(hidden):
            raise LocalClusterError(
                f"the cache {folder} is below {hidden}, which every node has for itself; set XDG_CACHE_HOME to another folder"
            )


def checkout_root() -> Path:
    """Give the folder that holds Dockerfile and pyproject.toml. Raises LocalClusterError outside a checkout."""
    for folder in (Path.cwd(), *Path.cwd().parents, *PACKAGE.parents):
        if (folder / "Dockerfile").is_file() and (folder / "pyproject.toml").is_file():
            return folder
    raise LocalClusterError("no Dockerfile was found; images are built from a checkout of elastipod, so run it there")


def cluster_dir(name: str, run_dir: Path | None = None) -> Path:
    """Give the folder of the cluster `name`, `.run/cluster/<name>` of the checkout unless run_dir says otherwise.

    run_dir: the folder of this one cluster. Raises LocalClusterError when the name is no DNS label.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise LocalClusterError(f"{name!r} is no cluster name; use up to 32 lower case letters, digits and hyphens")
    return (run_dir or clusters_dir() / name).absolute()


def clusters_dir() -> Path:
    """Give the folder that holds all clusters of this checkout (or of the working folder outside one)."""
    try:
        return checkout_root() / ".run" / "cluster"
    except LocalClusterError:
        return Path.cwd() / ".run" / "cluster"
