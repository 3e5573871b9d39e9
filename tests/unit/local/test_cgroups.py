"""Reading the machine's control group hierarchies."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastipod_local.cgroups import Layout, NodeGroup, parse_mounts

HYBRID = """\
proc /proc proc rw,relatime 0 0
tmpfs /sys/fs/cgroup tmpfs rw,mode=755 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,nosuid,nodev,noexec,relatime,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/systemd cgroup rw,relatime,xattr,release_agent=/x,name=systemd 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime,nsdelegate 0 0
cgroup /elsewhere cgroup rw,memory 0 0
"""
UNIFIED = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nodev,noexec,relatime,nsdelegate,memory_recursiveprot 0 0\n"


@pytest.mark.parametrize(
    ("mounts", "unified", "expected"),
    [
        pytest.param(
            HYBRID,
            False,
            [
                ("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "cpu,cpuacct"),
                ("/sys/fs/cgroup/systemd", "cgroup", "none,name=systemd"),
                ("/sys/fs/cgroup/unified", "cgroup2", ""),
            ],
            id="v1 beside v2",
        ),
        pytest.param(UNIFIED, True, [("/sys/fs/cgroup", "cgroup2", "")], id="v2 alone"),
    ],
)
def test_hierarchies(mounts: str, unified: bool, expected: list[tuple[str, str, str]]) -> None:
    layout = parse_mounts(mounts)
    assert [(str(h.mount_point), h.kind, h.options) for h in layout.hierarchies] == expected
    assert layout.unified is unified


def test_a_group_lies_in_every_hierarchy() -> None:
    group = NodeGroup(parse_mounts(HYBRID), "elastipod0/node-1")
    assert group.folders()[0] == Path("/sys/fs/cgroup/cpu,cpuacct/elastipod0/node-1")
    assert [file.name for file in group.join_files()] == ["cgroup.procs"] * 3


def test_a_group_that_was_never_made_is_empty_and_removed_at_once() -> None:
    group = NodeGroup(Layout(parse_mounts(UNIFIED).hierarchies), "elastipod-never-made")
    assert list(group.processes()) == []
    group.freeze(frozen=False)
    group.remove()
