"""What the allocator is told about memory that this process frees."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from elastipod.freed_memory import keep_freed_memory


def test_the_allocator_is_told_both_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    def mallopt(option: int, value: int) -> int:
        calls.append((option, value))
        return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert keep_freed_memory(1 << 20, block_bytes=1 << 16)
    assert sorted(calls) == [(-3, 1 << 16), (-1, 1 << 20)]


@pytest.mark.parametrize("library", [SimpleNamespace(), SimpleNamespace(mallopt=lambda name, value: 0)])
def test_another_allocator_keeps_nothing(monkeypatch: pytest.MonkeyPatch, library: SimpleNamespace) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    assert not keep_freed_memory(1 << 20, block_bytes=1 << 16)


def test_glibc_takes_what_it_is_told() -> None:
    """In a process of its own, whose allocator may be changed."""
    script = "from elastipod.freed_memory import *; print(keep_freed_memory(1 << 30, block_bytes=MOST_MAP_THRESHOLD))"
    ended = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == "True"
