"""Memory that a process has from the system before it needs it: counted by the pages that its first use of it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastipod.in_memory import host_memory as module
from elastipod.in_memory.host_memory import BLOCK_BYTES, MOST_RESERVED_BYTES, private_bytes, reserve

# A step's worth of tensors, larger and smaller than what malloc maps by itself. What imports have left free in the heap, megabytes where
# they had to compile, is returned first: the reserve would use it, and the process has it already.
USES_MEMORY = """
import ctypes, resource, sys, torch
from elastipod.in_memory.host_memory import private_bytes, reserve
ctypes.CDLL(None).malloc_trim(0)
before = private_bytes()
given = reserve(int(sys.argv[1]))
has = private_bytes() - before
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
tensors = [torch.empty(each << 10).fill_(1.0) for each in (3, 40, 700, 2000, 4000)]
used = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
print(given, has, used, sum(each.nbytes for each in tensors) // 4096)
"""


def _use_memory(reserved: int) -> list[int]:
    ended = subprocess.run(
        [sys.executable, "-c", USES_MEMORY, str(reserved)], check=True, capture_output=True, text=True
    )
    return [int(each) for each in ended.stdout.split()]


def test_tensors_after_a_reserve_cost_no_pages() -> None:
    given, has, faults, pages = _use_memory(64 << 20)
    assert given == 64 << 20
    assert has >= given
    assert faults < pages / 20
    given, _, faults, pages = _use_memory(0)
    assert given == 0
    assert faults > pages / 2, "the test can tell"


def test_no_more_is_reserved_than_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Block:
        def __setitem__(self, at: slice, value: int) -> None:
            assert (at.step, value) == (4096, 0)

    def empty(size: int, **options: Any) -> Block:
        assert options == {"dtype": torch.uint8, "device": "cpu"}
        made.append(size)
        return Block()

    monkeypatch.setattr(module, "keep_freed_memory", lambda num_bytes, block_bytes: True)
    monkeypatch.setattr(torch, "empty", empty)
    assert reserve(MOST_RESERVED_BYTES * 5) == MOST_RESERVED_BYTES == BLOCK_BYTES * len(made)
    assert set(made) == {BLOCK_BYTES}


@pytest.mark.parametrize("wanted", [-5 * BLOCK_BYTES, 0, BLOCK_BYTES - 1])
def test_a_process_that_has_as_much_reserves_nothing(monkeypatch: pytest.MonkeyPatch, wanted: int) -> None:
    monkeypatch.setattr(module, "keep_freed_memory", lambda *_, **__: pytest.fail("the allocator was changed"))
    assert reserve(wanted) == 0


def test_nothing_is_reserved_where_freed_memory_would_not_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "keep_freed_memory", lambda *_, **__: False)
    assert reserve(BLOCK_BYTES) == 0


def test_the_memory_of_a_process_is_what_the_system_has_given_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert private_bytes() > 1 << 20
    status = tmp_path / "status"
    monkeypatch.setattr(module, "_STATUS", status)
    assert private_bytes() == 0, "no such file"
    status.write_text("Name:\tpython\nVmRSS:\t  900 kB\nRssAnon:\t  700 kB\n")
    assert private_bytes() == 700 << 10
    status.write_text("Name:\tpython\n")
    assert private_bytes() == 0
