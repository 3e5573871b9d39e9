"""Reading the machine's control group hierarchies."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path

import pytest

from elastipod_local.cgroups import Hierarchy, Layout, NodeGroup, parse_mounts, require_shareable
from elastipod_local.errors import LocalClusterError, UnsupportedError

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


@pytest.fixture
def unified(tmp_path: Path) -> NodeGroup:
    """A node's group in a hierarchy of v2 that offers one controller."""
    (tmp_path / "cgroup.controllers").write_text("memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    return NodeGroup(Layout((Hierarchy(tmp_path, "cgroup2", ""),)), "elastipod0")


def refuse(monkeypatch: pytest.MonkeyPatch, method: str, number: int) -> None:
    def fail(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, method, fail)


def test_a_container_whose_processes_are_in_the_root_group_is_told_what_to_do(
    unified: NodeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root of a cgroup namespace is an ordinary group: with processes of its own it shares out no controller."""
    refuse(monkeypatch, "write_text", errno.EBUSY)
    with pytest.raises(LocalClusterError) as told:
        unified.create()
    assert str(told.value) == (
        f"the control group {unified.layout.hierarchies[0].mount_point} cannot share out memory, because it holds processes "
        "of its own; move them into a group below it first, or start the container with --cgroupns=host"
    )


def test_the_refusal_of_a_group_that_shares_out_processors_already_is_the_same(
    unified: NodeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors can be shared out beside processes of its own; then the kernel refuses all else in these words."""
    refuse(monkeypatch, "write_text", errno.EOPNOTSUPP)
    with pytest.raises(LocalClusterError, match="cannot share out memory, because it holds processes of its own"):
        unified.create()


def test_all_controllers_are_asked_for_at_once(unified: NodeGroup) -> None:
    """One by one the first would be granted, and leave behind a group that can have none of the others."""
    root = unified.layout.hierarchies[0].mount_point
    (root / "cgroup.controllers").write_text("cpuset cpu io memory hugetlb pids rdma\n")
    unified.create()
    assert (root / "cgroup.subtree_control").read_text() == "+cpu +cpuset +io +memory +pids +hugetlb"


@pytest.mark.parametrize(
    ("files", "possible"),
    [
        pytest.param({"cgroup.procs": "1\n7\n"}, True, id="the machine's own root group"),
        pytest.param({"cgroup.type": "domain\n", "cgroup.procs": "1\n7\n"}, False, id="that of a container"),
        pytest.param({"cgroup.type": "domain\n", "cgroup.procs": ""}, True, id="that of a container with systemd"),
        pytest.param(
            {"cgroup.type": "domain\n", "cgroup.procs": "1\n", "cgroup.subtree_control": "cpu memory io\n"},
            True,
            id="one that shares out what there is",
        ),
    ],
)
def test_a_container_with_a_root_group_of_its_own_is_told_before_anything_is_built(
    files: dict[str, str], possible: bool, unified: NodeGroup
) -> None:
    root = unified.layout.hierarchies[0].mount_point
    (root / "cgroup.controllers").write_text("cpu io memory\n")
    for name, content in files.items():
        (root / name).write_text(content)
    with nullcontext() if possible else pytest.raises(UnsupportedError, match="--cgroupns=host"):
        require_shareable(unified.layout)


@pytest.mark.parametrize("method", ["write_text", "mkdir"])
def test_control_groups_that_cannot_be_written_are_told(
    method: str, unified: NodeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, method, errno.EROFS)
    with pytest.raises(LocalClusterError, match=r"Read-only file system.*; start the container with --privileged"):
        unified.create()
