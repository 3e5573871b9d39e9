"""A newer generation claims the directory between any two calls of one that saves and prunes: nothing of the old one appears or goes."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.manifest import CheckpointId, FileRecord, Manifest
from elastipod.errors import FencedError

# What changes a directory, or reads what is in it.
CALLS = ("mkdir", "rename", "listdir", "link", "unlink", "rmdir", "fsync", "stat")
KEEP = 2


def save(directory: DirectoryStore, step: int) -> None:
    """Save a checkpoint of generation 1, as rank 0 does."""
    of = CheckpointId(step, 1)
    draft = directory.begin(of)
    with directory.create_file(draft, "a") as file:
        file.write(b"part")
    directory.commit(draft, Manifest(of, 1, {"a": FileRecord(4, "0b8f2e5d")}, {}))


class Takeover:
    """Generation 2 claims the directory before a certain call. found: the checkpoints that it found afterwards; None before."""

    def __init__(self, folder: Path, number: int, patch: pytest.MonkeyPatch) -> None:
        self.found: list[CheckpointId] | None = None
        self._folder, self._left, self._is_under_way = folder, number, False
        for name in CALLS:
            patch.setattr(os, name, self._watched(getattr(os, name)))

    def _watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            if not self._is_under_way:
                self._left -= 1
                if self._left == 0:
                    self._take_over()
            return real(*arguments, **more)

        return call

    def _take_over(self) -> None:
        self._is_under_way = True
        successor = DirectoryStore(self._folder)
        successor.claim(2)
        self.found = successor.list_complete()
        self._is_under_way = False


def test_whatever_a_replaced_generation_was_doing_nothing_of_it_follows_the_claim(tmp_path: Path) -> None:
    steps_found: set[int] = set()
    for number in itertools.count(1):
        directory = DirectoryStore(tmp_path / str(number))
        directory.claim(1)
        for step in range(1, 5):
            save(directory, step)
        with pytest.MonkeyPatch.context() as patch:
            takeover = Takeover(directory.path, number, patch)
            try:
                save(directory, 5)
                directory.prune(1, KEEP, damaged=[CheckpointId(4, 1)])
            except FencedError:
                assert takeover.found is not None
        if takeover.found is None:
            break
        assert directory.list_complete() == takeover.found, f"the claim came before call {number}"
        steps_found.add(len(takeover.found))
    assert steps_found == {2, 3, 4, 5}, "before the commit, behind it, and between the deletions"
    assert directory.list_complete() == [CheckpointId(5, 1), CheckpointId(3, 1)]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_disk_without_room_for_a_folder_gets_room(
    tmp_path: Path, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = DirectoryStore(tmp_path)
    directory.claim(1)
    for step in range(1, 5):
        save(directory, step)

    def is_full(*_: object) -> None:
        if is_replaced:
            (tmp_path / ".claims" / "gen-000002").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", is_full)
    if is_replaced:
        with pytest.raises(FencedError):
            directory.prune(1, KEEP)
    else:
        directory.prune(1, KEEP)
    assert [each.step for each in directory.list_complete()] == ([4, 3, 2, 1] if is_replaced else [4, 3])
    assert [name for name in os.listdir(tmp_path) if name.startswith(".tmp")] == []


def test_a_deletion_that_fails_for_another_reason_than_room_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = DirectoryStore(tmp_path)
    directory.claim(1)
    for step in (1, 2):
        save(directory, step)

    def refused(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "mkdir", refused)
    with pytest.raises(OSError, match="Input/output error"):
        directory.prune(1, 1)
    assert [each.step for each in directory.list_complete()] == [2, 1]
