"""What an object store must be able to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec")

from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]  # noqa: E402

from elastipod.checkpoint.bucket_store import BucketStore  # noqa: E402
from elastipod.checkpoint.manifest import CheckpointId, FileRecord, Manifest  # noqa: E402
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
    for system in (Careless, Counted, MemoryFileSystem):
        system.store.clear()
        system.pseudo_dirs[:] = [""]


def test_a_store_that_lets_a_file_be_created_twice_is_refused() -> None:
    fsspec.register_implementation("careless", Careless, clobber=True)
    with pytest.raises(CheckpointError, match="careless://bucket/x lets an existing file be created again"):
        BucketStore("careless://bucket/x", {}).claim(None)


class Counted(MemoryFileSystem):  # type: ignore[misc]
    """Counts what is read."""

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    read: list[str] = []  # noqa: RUF012

    def cat_file(self, path: str, **options: Any) -> Any:
        self.read.append(path)
        return super().cat_file(path, **options)


def test_checkpoints_are_listed_without_reading_their_manifests() -> None:
    fsspec.register_implementation("counted", Counted, clobber=True)
    store = BucketStore("counted://bucket/x", {})
    store.claim(None)
    for step in range(1, 5):
        target = CheckpointId(step, 1)
        begun = store.begin(target)
        with store.create_file(begun, "__0_0.distcp") as file:
            file.write(b"part")
        if step < 4:
            files = {name: FileRecord(4, "0" * 8) for name in ("__0_0.distcp", ".metadata")}
            store.commit(begun, Manifest(target, 1, files, {}))
    assert store.claim(None) == 2  # puts a barrier where step 4 was begun
    Counted.read.clear()
    assert [each.step for each in store.list_complete()] == [3, 2, 1]
    assert [path.split("/")[-2:] for path in Counted.read] == [["step-0000000004-gen-000001", "elastipod.json"]]
    store._delete_unfinished(2)
    assert {each.step for each, _ in store._written()} == {3, 2, 1}


def test_a_store_that_does_not_is_taken_and_left_clean() -> None:
    store = BucketStore("memory://bucket/x", {})
    assert store.claim(None) == 1
    assert store._names(".claims") == ["gen-000001"]


def test_in_a_file_system_with_folders_they_are_made(tmp_path: Path) -> None:
    store = BucketStore(f"file://{tmp_path}/bucket/x", {})
    assert store.claim(None) == 1
    target = CheckpointId(3, 1)
    begun = store.begin(target)
    for name in ("__0_0.distcp", ".metadata"):
        with store.create_file(begun, name) as file:
            file.write(b"part")
    store.commit(
        begun, Manifest(target, 1, {name: FileRecord(4, "0" * 8) for name in ("__0_0.distcp", ".metadata")}, {})
    )
    assert store.list_complete() == [target]
    assert store.read_range(target, "__0_0.distcp", 1, 2) == b"ar"
    folder = tmp_path / "bucket" / "x" / target.name
    assert {path.name for path in folder.iterdir()} >= {".metadata", "__0_0.distcp", "elastipod.json"}
