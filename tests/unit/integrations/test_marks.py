"""Marks: which of a framework's checkpoints are complete."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

from elastipod.errors import CheckpointError, FencedError, FrameworkError
from elastipod.integrations.marks import MARK, MarkedCheckpoints

NAME = re.compile(r"checkpoint-(\d+)")


def write(checkpoints: MarkedCheckpoints, step: int, *, is_marked: bool = True) -> Path:
    path = checkpoints.directory / f"checkpoint-{step}"
    checkpoints.begin(path)
    (path / "part").mkdir(parents=True)
    (path / "part" / "weights").write_bytes(b"w" * step)
    if is_marked:
        checkpoints.finish(path, step, {"samples": 3 * step})
    return path


def test_the_newest_complete_checkpoint_is_found(tmp_path: Path) -> None:
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    assert checkpoints.newest() is None
    write(checkpoints, 9)
    write(checkpoints, 10)
    found = MarkedCheckpoints(tmp_path, NAME).newest()
    assert found is not None
    assert (found.path.name, found.step, found.generation, found.world_size) == ("checkpoint-10", 10, 1, 1)
    assert found.data == {"samples": 30}


def test_what_is_not_complete_is_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    write(checkpoints, 1)
    for step in (2, 3, 4, 5):
        write(checkpoints, step)
    (tmp_path / "checkpoint-2" / "part" / "weights").write_bytes(b"")
    (tmp_path / "checkpoint-3" / "part" / "weights").unlink()
    (tmp_path / "checkpoint-4" / MARK).write_text("{")
    write(checkpoints, 6, is_marked=False)
    (tmp_path / "checkpoint-5" / MARK).unlink()
    with caplog.at_level(logging.WARNING):
        found = checkpoints.newest()
    assert found is not None
    assert found.step == 1
    reasons = [record.getMessage() for record in caplog.records]
    assert len(reasons) == 5
    assert "has no elastipod.json" in reasons[0]
    assert "weights is missing" in reasons[3]
    assert "part/weights has 0 bytes, but 2 were written" in reasons[4]


def hang_up(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    """Have storage fail wherever the mark of a checkpoint is read."""
    read = Path.read_text

    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        if path == checkpoint / MARK:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)


def test_a_mark_that_storage_cannot_read_at_the_moment_is_no_reason_to_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    for step in (1, 2):
        write(checkpoints, step)
    hang_up(monkeypatch, tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r"checkpoint-2 cannot be read at the moment: Input/output error; start"):
        checkpoints.newest()


def test_an_older_mark_that_storage_cannot_read_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    for step in (1, 2, 3, 4):
        write(checkpoints, step)
    hang_up(monkeypatch, tmp_path / "checkpoint-2")
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 4
    checkpoints.prune(1)
    assert {path.parent.name for path in tmp_path.glob(f"checkpoint-*/{MARK}")} == {
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-4",
    }


def test_a_checkpoint_that_is_written_again_is_not_complete_meanwhile(tmp_path: Path) -> None:
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    path = write(checkpoints, 3)
    checkpoints.begin(path)
    assert checkpoints.newest() is None


def test_only_complete_checkpoints_beyond_the_newest_are_deleted(tmp_path: Path) -> None:
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    for step in (1, 2, 3, 4):
        write(checkpoints, step, is_marked=step != 1)
    checkpoints.prune(2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == [
        "checkpoint-1",
        "checkpoint-3",
        "checkpoint-4",
    ]


def test_a_replaced_generation_deletes_nothing(tmp_path: Path) -> None:
    old = MarkedCheckpoints(tmp_path, NAME)
    for step in (1, 2):
        write(old, step)
    new = MarkedCheckpoints(tmp_path, NAME)
    with pytest.raises(FencedError, match="generation 2 has taken over"):
        old.prune(1)
    assert (tmp_path / "checkpoint-1" / MARK).exists()
    new.prune(1)
    assert not (tmp_path / "checkpoint-1").exists()


def test_a_replaced_generation_is_refused_before_it_writes(tmp_path: Path) -> None:
    old, _new = MarkedCheckpoints(tmp_path, NAME), MarkedCheckpoints(tmp_path, NAME)
    with pytest.raises(FencedError, match="generation 2 has taken over"):
        old.begin(tmp_path / "checkpoint-1")


def test_another_jobs_directory_is_refused_or_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIPOD_JOB", "team/first")
    MarkedCheckpoints(tmp_path, NAME)
    monkeypatch.setenv("ELASTIPOD_JOB", "team/second")
    with pytest.raises(CheckpointError, match="holds the checkpoints of job team/first"):
        MarkedCheckpoints(tmp_path, NAME)
    MarkedCheckpoints(tmp_path, NAME, adopt=True)


def test_a_mark_of_another_version_is_refused(tmp_path: Path) -> None:
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    mark = write(checkpoints, 3) / MARK
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "v": 2}))
    assert checkpoints.newest() is None


def test_what_is_no_shared_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FrameworkError, match="name a directory that all ranks share"):
        MarkedCheckpoints("s3://bucket/out", NAME)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError):
        MarkedCheckpoints(tmp_path / "file", NAME)


def test_a_mark_says_what_was_saved_by_whom_and_how_large_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other versions read it."""
    monkeypatch.setenv("ELASTIPOD_GENERATION", "4")
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    path = tmp_path / "checkpoint-3"
    checkpoints.begin(path)
    (path / "part").mkdir(parents=True)
    (path / "part" / "weights").write_bytes(b"www")
    (path / "empty").touch()
    (path / f".{MARK}").write_text("{")  # of a process that was killed while it marked the same checkpoint
    checkpoints.finish(path, 3, {"samples": 9}, {"global_batch": 6})
    assert json.loads((path / MARK).read_text()) == {
        "v": 1,
        "step": 3,
        "generation": 4,
        "world_size": 1,
        "data": {"samples": 9},
        "extra": {"global_batch": 6},
        "files": {"part/weights": 3, "empty": 0},
    }
    assert sorted(each.name for each in path.iterdir()) == ["elastipod.json", "empty", "part"]


def test_a_checkpoint_that_was_deleted_in_part_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    for step in (1, 2):
        write(checkpoints, step)
    monkeypatch.setattr("shutil.rmtree", lambda path, ignore_errors: None)  # its files cannot be deleted
    checkpoints.prune(1)
    assert not (tmp_path / "checkpoint-1" / MARK).exists()
    checkpoints.prune(0)
    assert checkpoints.newest() is None


def test_the_newest_is_that_of_the_highest_step_among_the_names_that_match(tmp_path: Path) -> None:
    checkpoints = MarkedCheckpoints(tmp_path, NAME)
    for step in (9, 10):
        write(checkpoints, step)
    (tmp_path / "checkpoint-9").rename(tmp_path / "checkpoint-11-copy")
    found = checkpoints.newest()
    assert found is not None
    assert found.step == 10
    assert found.extra == {}
