"""What an object store must be able to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")

from fsspec.implementations.memory import MemoryFileSystem  # noqa: E402

from elastipod.checkpoints.bucket import CheckpointBucket  # noqa: E402
from elastipod.errors import CheckpointError  # noqa: E402


class Careless(MemoryFileSystem):  # type: ignore[misc]
    """Takes no notice of the wish that a file be new, as some stores and some clients."""

    protocol = "careless"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        super().pipe_file(path, value, mode="overwrite")


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    yield
    for system in (Careless, MemoryFileSystem):
        system.store.clear()
        system.pseudo_dirs[:] = [""]


def test_a_store_that_lets_a_file_be_created_twice_is_refused() -> None:
    fsspec.register_implementation("careless", Careless, clobber=True)
    with pytest.raises(CheckpointError, match="careless://bucket/x lets an existing file be created once more"):
        CheckpointBucket("careless://bucket/x", {}).claim(None)


def test_a_store_that_does_not_is_taken_and_left_clean() -> None:
    store = CheckpointBucket("memory://bucket/x", {})
    assert store.claim(None) == 1
    assert store._names(".claims") == ["gen-000001"]
