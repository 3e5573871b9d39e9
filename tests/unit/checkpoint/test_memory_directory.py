"""The folder of a job's images: who may use it, what is in it, and what is deleted from it."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.checkpoint.save_plans import make_save_plan

from elastipod.checkpoint import memory_directory
from elastipod.checkpoint.chunk import Chunk
from elastipod.checkpoint.image import MappedImage
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory, host_identity, memory_root, open_memory_directory
from elastipod.checkpoint.save_plan import LocalState

HEADER = ImageHeader(CheckpointId(7, 2), 1, 0, 2, "dddd", 3, "", None, {}, {})
NAME = "image-gen-000002-rank-00001-slot-0"
DAY = 86_400


@pytest.fixture
def directory(tmp_path: Path) -> MemoryDirectory:
    return MemoryDirectory(tmp_path / "root", "job")


def names(directory: MemoryDirectory) -> list[str]:
    return sorted(each.name for each in directory.path.iterdir())


def test_the_folder_is_named_by_the_job_and_private(directory: MemoryDirectory, tmp_path: Path) -> None:
    assert directory.path == tmp_path / "root" / f"elastipod-images-{hashlib.sha256(b'job').hexdigest()[:20]}"
    assert directory.path.stat().st_mode & 0o777 == 0o700
    again, other = MemoryDirectory(tmp_path / "root", "job"), MemoryDirectory(tmp_path / "root", "another")
    assert again.path == directory.path
    found = directory.path.stat()
    wanted = hashlib.sha256(f"{host_identity()} {found.st_dev} {found.st_ino}".encode()).hexdigest()[:16]
    assert (directory.node(), again.node()) == (wanted, wanted)
    assert other.node() != wanted


def test_the_machine_is_known_by_its_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host_identity() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    monkeypatch.setattr(Path, "exists", lambda self: False)
    assert host_identity() == os.uname().nodename


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = MemoryDirectory(tmp_path, "job").path
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)
        with pytest.raises(PermissionError) as raised:
            MemoryDirectory(tmp_path, "job")
    assert str(raised.value) == f"{path} belongs to somebody else"
    path.rmdir()
    (tmp_path / "elsewhere").mkdir()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        MemoryDirectory(tmp_path, "job")


def test_complete_images_are_those_with_a_header_of_their_own_name(directory: MemoryDirectory) -> None:
    for name in ("notes.json", f"{NAME}.json.old", "image-gen-000002-rank-00002-slot-1.json", f"{NAME}.bin"):
        (directory.path / name).write_text(HEADER.to_json())
    (directory.path / "image-gen-000002-rank-00003-slot-0.json").write_text("torn")
    (directory.path / "image-gen-000002-rank-00004-slot-0.json").mkdir()
    assert directory.headers() == []
    directory.publish(HEADER)
    assert directory.headers() == [HEADER]
    assert (directory.path / f"{NAME}.json").read_text() == HEADER.to_json()
    directory.withdraw(NAME)
    directory.withdraw(NAME)
    assert directory.headers() == []


@pytest.mark.parametrize(("spare", "is_read"), [(0, True), (-1, False)])
def test_a_header_may_have_so_many_bytes(
    directory: MemoryDirectory, monkeypatch: pytest.MonkeyPatch, spare: int, is_read: bool
) -> None:
    directory.publish(HEADER)
    monkeypatch.setattr(memory_directory, "_MAX_HEADER_BYTES", len(HEADER.to_json()) + spare)
    assert directory.headers() == ([HEADER] if is_read else [])


def test_a_plan_is_kept_once_and_read_by_its_digest(
    directory: MemoryDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = Chunk("w", ("w",), "uint8", (8,), (0,), (8,), 8)
    plan = make_save_plan([LocalState("ä", (chunk,), ())], is_in_memory=True)
    path = directory.path / f"plan-{plan.digest}.json"
    directory.store_plan(plan)
    assert (names(directory), path.read_text(encoding="utf-8")) == ([path.name], plan.to_json())
    written = path.stat().st_ino
    os.utime(path, (1, 1))
    directory.store_plan(plan)
    assert path.stat().st_ino == written
    assert path.stat().st_mtime > time.time() - memory_directory.PLAN_MIN_AGE_S / 2, "as new as if it had been written"
    assert directory.plan(plan.digest) == plan
    assert directory.plan("0" * 32) is None
    (directory.path / f"plan-{'0' * 32}.json").write_text(plan.to_json())
    assert directory.plan("0" * 32) is None, "the plan of another name"
    monkeypatch.setattr(memory_directory, "_MAX_PLAN_BYTES", path.stat().st_size)
    assert directory.plan(plan.digest) == plan
    monkeypatch.setattr(memory_directory, "_MAX_PLAN_BYTES", path.stat().st_size - 1)
    assert directory.plan(plan.digest) is None
    path.write_text("torn")
    assert directory.plan(plan.digest) is None


def test_a_newer_durable_checkpoint_is_noted_or_the_image_dropped(
    directory: MemoryDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    second = replace(HEADER, rank=3)
    headers = {NAME: HEADER, second.name: second}
    for header in headers.values():
        directory.publish(header)
    durable = CheckpointId(6, 2)
    directory.note_durable(headers, durable)
    noted = {NAME: replace(HEADER, durable=durable), second.name: replace(second, durable=durable)}
    assert headers == noted
    assert sorted(directory.headers(), key=lambda each: each.rank) == list(noted.values())
    write = MemoryDirectory._write

    def full(self: MemoryDirectory, name: str, text: str) -> None:
        if name == f"{NAME}.json":
            raise OSError(errno.ENOSPC, "No space left")
        write(self, name, text)

    monkeypatch.setattr(MemoryDirectory, "_write", full)
    with caplog.at_level(logging.WARNING):
        directory.note_durable(headers, CheckpointId(7, 2))
    assert headers == {second.name: replace(second, durable=CheckpointId(7, 2))}
    assert directory.headers() == list(headers.values())
    assert caplog.messages == [f"the memory checkpoint of step 7 is dropped: [Errno {errno.ENOSPC}] No space left"]


def test_only_what_no_present_image_needs_is_deleted(directory: MemoryDirectory) -> None:
    old = replace(HEADER, id=CheckpointId(5, 1), plan="old")
    for header in (HEADER, old):
        directory.publish(header)
    for name in (
        f"{NAME}.bin", f"{old.name}.bin", f".{old.name}.json-0123", f".{NAME}.json-0123", "image-gen-000001-rank-00009-slot-1.bin",
        "plan-dddd.json", "plan-old.json", "plan-none.json", ".plan-dddd.json-0123", "notes", "planned",
    ):  # fmt: skip
        (directory.path / name).touch()
        os.utime(directory.path / name, (1, 1))
    directory.remove_stale_images([old.name], older_than=1)
    kept = {
        f"{NAME}.json", f"{NAME}.bin", f"{old.name}.json", f"{old.name}.bin", f".{old.name}.json-0123", f".{NAME}.json-0123",
        "image-gen-000001-rank-00009-slot-1.bin", "plan-dddd.json", "plan-old.json", "notes", "planned",
    }  # fmt: skip
    assert set(names(directory)) == kept
    directory.remove_stale_images([old.name], older_than=2)
    assert set(names(directory)) == kept - {"image-gen-000001-rank-00009-slot-1.bin"}
    directory.remove_stale_images((), older_than=2)
    kept -= {"image-gen-000001-rank-00009-slot-1.bin", f"{old.name}.json", f"{old.name}.bin", f".{old.name}.json-0123"}
    assert set(names(directory)) == kept, "a plan goes with the next save"
    directory.remove_stale_images((), older_than=2)
    assert set(names(directory)) == kept - {"plan-old.json"}


def test_a_plan_that_an_image_is_about_to_refer_to_is_kept(directory: MemoryDirectory) -> None:
    """A process of an older generation that still lives lists the folder between the plan and the header."""
    chunk = Chunk("w", ("w",), "uint8", (8,), (0,), (8,), 8)
    plan = make_save_plan([LocalState("w", (chunk,), ())], is_in_memory=True)
    directory.store_plan(plan)
    draft = directory.path / f".plan-{plan.digest}.json-0123"
    draft.touch()
    directory.remove_stale_images((), older_than=1)
    assert directory.plan(plan.digest) == plan
    assert draft.exists()
    for path in (draft, directory.path / f"plan-{plan.digest}.json"):
        age_s = memory_directory.PLAN_MIN_AGE_S + 1
        os.utime(path, (time.time() - age_s,) * 2)
    directory.remove_stale_images((), older_than=1)
    assert names(directory) == []


def test_a_folder_that_is_gone_is_nothing_to_clean(directory: MemoryDirectory) -> None:
    directory.path.rmdir()
    directory.remove_stale_images((), older_than=9)
    directory.remove_unfinished([NAME])
    with pytest.raises(FileNotFoundError):
        directory.publish(HEADER)
    with pytest.raises(FileNotFoundError):
        directory.headers()


def test_what_images_occupy_is_counted_in_blocks(directory: MemoryDirectory) -> None:
    (directory.path / "a.bin").write_bytes(b"x" * 5000)
    (directory.path / "b.bin").write_bytes(b"x")
    of_a, of_b = (512 * (directory.path / name).stat().st_blocks for name in ("a.bin", "b.bin"))
    assert of_a >= 5000
    assert directory.size_of(["a", "missing", "b"]) == of_a + of_b
    assert directory.size_of([]) == 0


def test_an_image_is_opened_or_refused_with_its_path(directory: MemoryDirectory) -> None:
    path = directory.path / f"{NAME}.bin"
    with pytest.raises(ValueError, match="No such file") as raised:
        directory.open(HEADER)
    assert str(raised.value) == f"{path} cannot be read: [Errno 2] No such file or directory: '{path}'"
    path.write_bytes(b"xy")
    with pytest.raises(ValueError, match="short") as raised:
        directory.open(HEADER)
    assert str(raised.value) == f"{path} cannot be read: it is cut short"
    path.write_bytes(b"xyz")
    with directory.open(HEADER) as image:
        assert isinstance(image, MappedImage)
        assert (image.size, bytes(image.bytes[:3].tolist())) == (3, b"xyz")


def test_a_file_appears_whole_or_not_at_all(directory: MemoryDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def refused(source: Path, target: Path) -> None:
        shown.append(source.name)
        assert target == directory.path / f"{NAME}.json"
        assert source.read_text(encoding="utf-8") == HEADER.to_json()
        raise OSError(errno.EACCES, "no")

    monkeypatch.setattr(os, "rename", refused)
    for _ in range(2):
        with pytest.raises(OSError, match="no"):
            directory.publish(HEADER)
    assert names(directory) == []
    assert [name[:-8] for name in shown] == [f".{NAME}.json-"] * 2
    assert shown[0] != shown[1]


@pytest.mark.parametrize(
    ("wanted", "named", "in_pod", "root"),
    [
        (False, "/named", True, None),
        ("/given", "/named", True, "/given"),
        (Path("/given"), "", False, "/given"),
        (None, "/named", False, "/named"),
        (True, "/named", False, "/named"),
        (None, "", False, None),
        (None, "", True, "/dev/shm"),
        (True, "", False, "/dev/shm"),
    ],
)
def test_where_images_go(
    monkeypatch: pytest.MonkeyPatch, wanted: str | Path | bool | None, named: str, in_pod: bool, root: str | None
) -> None:
    monkeypatch.setenv("ELASTIPOD_MEMORY_DIR", named)
    assert memory_root(wanted, is_in_pod=in_pod) == (None if root is None else Path(root))


def test_folders_of_other_jobs_go_after_three_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10**9
    monkeypatch.setattr("elastipod.checkpoint.memory_directory.time.time", lambda: now)
    for name, age in (
        ("elastipod-images-old", 3 * DAY + 1), ("elastipod-images-new", 3 * DAY), ("elastipod-agent", 9 * DAY),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "image").touch()
        os.utime(tmp_path / name, (now - age, now - age))
    (tmp_path / "elastipod-images-file").touch()
    os.utime(tmp_path / "elastipod-images-file", (0, 0))
    ours = MemoryDirectory(tmp_path, "job").path
    os.utime(ours, (0, 0))
    found = open_memory_directory(tmp_path, "job")
    assert found is not None
    assert found.path == ours
    assert {each.name for each in tmp_path.iterdir()} == {
        "elastipod-agent", "elastipod-images-file", "elastipod-images-new", ours.name,
    }  # fmt: skip


def test_memory_is_optional(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        assert open_memory_directory(tmp_path / "file", "job") is None
        assert open_memory_directory(None, "job") is None
    (told,) = caplog.messages
    assert told.startswith("no checkpoints are kept in memory: [Errno 20] Not a directory: ")
