"""Limits on the memory of images, as control groups of both versions say them."""

from __future__ import annotations

from pathlib import Path

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
