"""The end of what a worker wrote to standard error, wherever that goes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastipod_agent.workers.worker_process import WorkerProcess

KEPT = 32 * 1024


def process(stderr: Any = None, stderr_file: Path | None = None) -> WorkerProcess:
    child: Any = None
    return WorkerProcess(0, child, Path("/nowhere"), [], stderr, stderr_file)


@pytest.mark.parametrize(
    ("written", "end"),
    [
        (b"", ""),
        (b"short\n", "short\n"),
        (b"x" * KEPT, "x" * KEPT),
        (b"lost" + b"x" * KEPT, "x" * KEPT),
        (b"\xffbad", "\ufffdbad"),
    ],
)
def test_of_a_file_the_end_is_kept(tmp_path: Path, written: bytes, end: str) -> None:
    (tmp_path / "err").write_bytes(written)
    assert process(stderr_file=tmp_path / "err").stderr_tail() == end


def test_a_file_that_is_gone_and_no_file_say_nothing(tmp_path: Path) -> None:
    assert process(stderr_file=tmp_path / "none").stderr_tail() == ""
    assert process().stderr_tail() == ""


def test_what_the_agent_has_read_itself_comes_first(tmp_path: Path) -> None:
    (tmp_path / "err").write_text("of the file")
    stream = SimpleNamespace(tail=bytearray(b"read\xff"))
    assert process(stream, tmp_path / "err").stderr_tail() == "read\ufffd"
