"""How much memory is left for images: by the limits of the control groups and the size of the memory file system. No torch.

Pages of a memory file system are charged to the container that first wrote them, and the kernel kills a container that
exceeds its limit, without warning. A job whose images do not fit would be killed again after every restart, so the limits
are checked before images are created.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastipod.json_records import json_row

_MARGIN = 20  # a twentieth of each limit is kept free for peaks of training
_NO_LIMIT = 1 << 60  # version 1 reports "no limit" as a number near 2**63


@json_row
@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit and what is left of it. where: identity, equal for all that share it; name: for messages; limit, free: bytes."""

    where: str
    name: str
    limit: int
    free: int


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """What one rank needs. limits: that it counts against; size: bytes; replaced: bytes that it frees in exchange."""

    limits: Sequence[MemoryLimit]
    size: int
    replaced: int = 0


def find_shortage(demands: Iterable[MemoryDemand]) -> str | None:
    """Return a sentence on the limit that the demands of all ranks would exceed, None if there is enough memory."""
    limits: dict[str, MemoryLimit] = {}
    sizes: dict[str, int] = {}
    replaced: dict[str, int] = {}
    for demand in demands:
        for limit in demand.limits:
            known = limits.setdefault(limit.where, limit)
            if limit.free < known.free:
                limits[limit.where] = limit
            sizes[limit.where] = sizes.get(limit.where, 0) + demand.size
            replaced[limit.where] = replaced.get(limit.where, 0) + demand.replaced
    for where, limit in limits.items():
        free = limit.free + replaced[where]
        if sizes[where] > free:
            return (
                f"{limit.name} allows {_mib(limit.limit)}, of which {_mib(max(0, free))} are free (a part is kept for training), and "
                f"they need {_mib(sizes[where])}"
            )
    return None


def memory_limits_of(folder: Path, node: str) -> list[MemoryLimit]:
    """Return the limits on what this process writes to a folder of a memory file system. node: identity of that folder."""
    found = os.statvfs(folder)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    file_system = [MemoryLimit(f"folder {node}", f"the memory file system of {folder}", size, free)] if size else []
    return [*file_system, *cgroup_limits()]


def cgroup_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the memory limits of this process's control group and of its parents, as far as they are visible.

    root: of the file system, for tests. A limit that cannot be read is ignored.
    """
    found: list[MemoryLimit] = []
    for folder, version in _groups(root):
        try:
            limit, used = _limit_and_use(folder, version)
        except (OSError, ValueError, KeyError):
            continue  # a group without limit, or one that this container may not read
        identity = os.stat(folder)
        name = f"the memory limit of {'the container' if not found else 'the group above the container'}"
        where = f"cgroup {identity.st_dev} {identity.st_ino}"
        found.append(MemoryLimit(where, name, limit, limit - used - limit // _MARGIN))
    return found


def _groups(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's memory groups, innermost first, and the version of their hierarchy."""
    try:
        own = (root / "proc/self/cgroup").read_text()
        mounts = (root / "proc/self/mountinfo").read_text()
    except OSError:
        return
    paths: dict[int, str] = {}
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(" ", 2)
        version = 2 if kind == "cgroup2" else 1 if kind == "cgroup" and "memory" in options.split(",") else 0
        if version in paths:
            yield from ((folder, version) for folder in _upwards(root, fields[3], fields[4], paths[version]))


def _upwards(root: Path, mounted: str, mount_point: str, path: str) -> Iterator[Path]:
    """Yield the folder of a group and those of its parents. mounted: the group that the mount point shows."""
    top = root / mount_point.lstrip("/")
    inside = os.path.relpath(path, mounted)
    if inside.startswith(".."):  # the mount shows other groups than the process names: use what it shows
        inside = "."
    folder = top / inside
    while True:
        yield folder
        if folder == top or inside == ".":
            return
        folder = folder.parent


def _limit_and_use(folder: Path, version: int) -> tuple[int, int]:
    """Return the limit, and the memory in use that cannot be reclaimed: file cache does not count. Raises ValueError for no limit."""
    if version == 2:
        limit = int((folder / "memory.max").read_text())  # "max" is no number
        names = ("memory.current", "inactive_file", "active_file")
    else:
        limit = int((folder / "memory.limit_in_bytes").read_text())
        names = ("memory.usage_in_bytes", "total_inactive_file", "total_active_file")
    if limit >= _NO_LIMIT:
        raise ValueError(f"{limit} is no limit")
    stat = _stat((folder / "memory.stat").read_text())
    return limit, int((folder / names[0]).read_text()) - sum(stat.get(name, 0) for name in names[1:])


def _stat(text: str) -> Mapping[str, int]:
    return {name: int(number) for name, number in (line.split() for line in text.splitlines())}


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
