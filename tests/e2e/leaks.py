"""What a local cluster could leave on a machine, listed so that before and after can be compared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from elastipod_local.addressing import Addressing
from elastipod_local.node_init import SYSCTLS
from elastipod_local.processes import tagged

A_TESTS = re.compile(
    r"/popen-gw\d+/test_"
)  # the folder of a test that runs beside; clusters that are compared have others
OTHERS = re.compile(r"elastipod\d+|epod\d+-")


@dataclass(frozen=True)
class Traces:
    """Everything of a kind that exists on the machine, as words that can be compared."""

    links: frozenset[str]
    cgroups: frozenset[str]
    mounts: frozenset[str]
    routes: frozenset[str]
    sysctls: frozenset[str]

    def new_since(self, before: Traces, own: Addressing) -> dict[str, set[str]]:
        """Give what was not there before, but for what bears the name of another cluster, or of a test, that runs beside."""

        def is_others(word: str) -> bool:
            named = OTHERS.search(word)
            own_names = (own.kernel_name, f"epod{own.block}-")
            return A_TESTS.search(word) is not None or (named is not None and named[0] not in own_names)

        return {
            field.name: new
            for field in fields(self)
            if (new := {w for w in getattr(self, field.name) - getattr(before, field.name) if not is_others(w)})
        }


def traces() -> Traces:
    """List what is on the machine now."""
    return Traces(
        links=frozenset(entry.name for entry in Path("/sys/class/net").iterdir()),
        cgroups=frozenset(str(path) for path in _cluster_groups()),
        mounts=frozenset(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        routes=frozenset(" ".join(line.split()[:2]) for line in Path("/proc/net/route").read_text().splitlines()),
        sysctls=frozenset(f"{name}={(Path('/proc/sys') / name).read_text().strip()}" for name in _sysctls()),
    )


def _cluster_groups() -> Iterator[Path]:
    for pattern in ("*/elastipod*", "*/elastipod*/**", "elastipod*", "elastipod*/**"):
        yield from (path for path in Path("/sys/fs/cgroup").glob(pattern) if path.is_dir())


def _sysctls() -> list[str]:
    named = [*SYSCTLS, "net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet", "net/netfilter/nf_conntrack_max"]
    return [name for name in named if (Path("/proc/sys") / name).exists()]


def processes_of(folder: Path) -> list[int]:
    """Give the processes that belong to the cluster in this folder."""
    return list(tagged(folder))
