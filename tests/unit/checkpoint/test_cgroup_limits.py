"""Limits on the memory of images, as control groups of both versions say them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod.checkpoint import memory_limits
from elastipod.checkpoint.memory_limits import MemoryDemand, MemoryLimit, cgroup_limits, find_shortage

MIB = 1 << 20
V2 = "31 23 0:28 {mounted} /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {mounted} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
)


def group(folder: Path, limit: str, used: int, file_cache: int = 0, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    prefix = "" if version == 2 else "total_"
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {file_cache}\n{prefix}active_file 0\n")


def machine(root: Path, own: str, mounts: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    (root / "proc/self/mountinfo").write_text(mounts)
    return root / "sys/fs/cgroup"


def sizes(root: Path) -> list[tuple[int, int]]:
    return [(room.limit // MIB, room.free // MIB) for room in cgroup_limits(root)]


def test_a_container_with_a_namespace_of_its_own(tmp_path: Path) -> None:
    top = machine(tmp_path, "0::/\n", V2.format(mounted="/"))
    group(top, str(1000 * MIB), 600 * MIB, 100 * MIB, version=2)
    assert sizes(tmp_path) == [(1000, 450)], "what the cache of files holds is free, a twentieth is kept"


def test_the_groups_above_count_too_and_no_limit_is_none(tmp_path: Path) -> None:
    top = machine(tmp_path, "0::/pod/container\n", V2.format(mounted="/"))
    group(top / "pod/container", "max", 300 * MIB, version=2)
    group(top / "pod", str(2000 * MIB), 900 * MIB, version=2)
    group(top, "max", 5000 * MIB, version=2)
    assert sizes(tmp_path) == [(2000, 1000)]


@pytest.mark.parametrize(
    ("mounted", "inside"),
    [
        pytest.param("/kubepods/pod1/abc", ".", id="the container's own group is what is mounted"),
        pytest.param("/", "kubepods/pod1/abc", id="the whole hierarchy is mounted"),
        pytest.param("/somewhere/else", ".", id="what is mounted is not named alike"),
    ],
)
def test_version_1(tmp_path: Path, mounted: str, inside: str) -> None:
    own = "9:name=systemd:/\n4:cpu,memory:/kubepods/pod1/abc\n0::/\n"
    top = machine(tmp_path, own, V1.format(mounted=mounted)) / "memory"
    group(top, str(2**63 - 4096), 9000 * MIB, version=1)
    group(top / inside, str(400 * MIB), 90 * MIB, 10 * MIB, version=1)
    assert sizes(tmp_path) == [(400, 300)]


@pytest.mark.parametrize("what", ["nothing", "no files", "other words"])
def test_what_cannot_be_read_limits_nothing(tmp_path: Path, what: str) -> None:
    if what != "nothing":
        top = machine(tmp_path, "0::/\n", V2.format(mounted="/"))
        if what == "other words":
            group(top, "lots", 1, version=2)
    assert cgroup_limits(tmp_path) == []


def test_what_is_written_to_a_memory_file_system_counts_for_it_and_for_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = MemoryLimit("cgroup 1", "the memory limit of the container", 100 * MIB, 60 * MIB)
    monkeypatch.setattr(memory_limits, "cgroup_limits", lambda: [container])
    folder, found = memory_limits.memory_limits_of(tmp_path, "node")
    assert folder.where == "folder node"
    assert 0 < folder.free <= folder.limit
    assert found is container


def test_ranks_that_share_a_limit_are_added_up() -> None:
    shared, other = (
        MemoryLimit("cgroup 1", "the memory limit of the container", 100 * MIB, 60 * MIB),
        MemoryLimit("2", "x", 9, 9),
    )
    assert (
        find_shortage([MemoryDemand([shared], 30 * MIB), MemoryDemand([shared], 30 * MIB), MemoryDemand([other], 9)])
        is None
    )
    assert find_shortage([MemoryDemand([shared], 30 * MIB), MemoryDemand([shared], 31 * MIB)]) == (
        "the memory limit of the container allows 100 MiB, of which 60 MiB are free (a part is kept for training), and they need 61 MiB"
    )
    assert find_shortage([MemoryDemand([shared], 90 * MIB, replaced=30 * MIB)]) is None, "what is written over is free"


def test_groups_of_both_versions_are_found_where_they_are_mounted(tmp_path: Path) -> None:
    """Paths may hold colons and dashes, and other mounts are of no interest."""
    own = "12:memory_of:/else\n9:cpu,memory:/kube:pods/a - b\n3:cpuset:/c\n0::/unified/own\n"
    mounts = (
        "30 23 0:27 / /mnt/odd rw - fuse memory rw,memory\n"
        "31 23 0:28 / /sys/fs/cgroup/unified rw,relatime shared:9 master:1 - cgroup2 cgroup2 rw\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu rw,memory - cgroup memory rw,cpu\n"
        "35 31 0:32 /kube:pods /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory,some\n"
    )
    top = machine(tmp_path, own, mounts)
    assert list(memory_limits._groups(tmp_path)) == [
        (top / "unified/unified/own", 2), (top / "unified/unified", 2), (top / "unified", 2),
        (top / "memory/a - b", 1), (top / "memory", 1),
    ]  # fmt: skip


def test_limits_are_told_with_their_place_and_a_twentieth_is_kept(tmp_path: Path) -> None:
    top = machine(tmp_path, "0::/pod/container\n", V2.format(mounted="/"))
    group(top / "pod/container", "1000", 600, 100, version=2)
    (top / "pod/container/memory.stat").write_text("anon 5\ninactive_file 100\nactive_file 30\n")
    group(top / "pod", str((1 << 60) - 1), 1, version=2)
    group(top, str(1 << 60), 1, version=2)
    container, above = (
        f"cgroup {found.st_dev} {found.st_ino}" for found in ((top / "pod/container").stat(), (top / "pod").stat())
    )
    huge = (1 << 60) - 1
    assert cgroup_limits(tmp_path) == [
        MemoryLimit(container, "the memory limit of the container", 1000, 1000 - (600 - 130) - 50),
        MemoryLimit(above, "the memory limit of the group above the container", huge, huge - 1 - huge // 20),
    ]


def test_one_group_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    top = machine(tmp_path, "0::/pod/container\n", V2.format(mounted="/"))
    group(top / "pod", "500", 200, version=2)
    (top / "pod/memory.stat").write_text("anon 5\n")
    assert [(each.limit, each.free) for each in cgroup_limits(tmp_path)] == [(500, 275)]


def test_the_size_of_a_memory_file_system_is_counted_in_its_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(f_blocks=100, f_frsize=4096, f_bsize=1, f_bavail=30, f_bfree=50)
    monkeypatch.setattr("elastipod.checkpoint.memory_limits.os.statvfs", {tmp_path: found}.__getitem__)
    monkeypatch.setattr(memory_limits, "cgroup_limits", list)
    wanted = MemoryLimit("folder n", f"the memory file system of {tmp_path}", 409600, 122880)
    assert memory_limits.memory_limits_of(tmp_path, "n") == [wanted]
    found.f_blocks = 1
    assert memory_limits.memory_limits_of(tmp_path, "n")[0].limit == 4096
    found.f_blocks = 0
    assert memory_limits.memory_limits_of(tmp_path, "n") == [], "a file system without a size of its own"


def test_the_least_that_any_rank_finds_free_counts_and_may_be_less_than_nothing() -> None:
    first, later = (MemoryLimit("1", "it", 3000 * MIB, free * MIB) for free in (50, -20))
    for limits in ([first, later], [later, first]):
        assert find_shortage([MemoryDemand([each], MIB) for each in limits]) == (
            "it allows 3,000 MiB, of which 0 MiB are free (a part is kept for training), and they need 2 MiB"
        )
    enough = MemoryLimit("2", "another", 10, 10)
    assert find_shortage([MemoryDemand([enough, first], 51 * MIB, replaced=MIB)]) == (
        "another allows 0 MiB, of which 1 MiB are free (a part is kept for training), and they need 51 MiB"
    )
    assert find_shortage([MemoryDemand([first], 51 * MIB, replaced=MIB)]) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_a_shortage_is_told_exactly_where_a_limit_would_be_passed(ranks: list[tuple[int, int, int, int]]) -> None:
    demands = [
        MemoryDemand([MemoryLimit(f"{at}", "it", 20, free)], size, replaced) for at, free, size, replaced in ranks
    ]
    short = False
    for at in {at for at, *_ in ranks}:
        own = [each for each in ranks if each[0] == at]
        free = min(each[1] for each in own) + sum(each[3] for each in own)
        short |= sum(each[2] for each in own) > free
    assert (find_shortage(demands) is not None) == short
