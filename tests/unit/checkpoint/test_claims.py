"""Claims of a directory, by generation, run and job, and what pruning leaves."""

from __future__ import annotations

import errno
import logging
import os
import re
import zlib
from pathlib import Path

import pytest
from tests.unit.checkpoint.other_thread import a_thread_that

from elastipod.checkpoint import directory_store, store
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.manifest import CheckpointId, DamagedCheckpoint, FileRecord, Manifest
from elastipod.errors import CheckpointError, FencedError


@pytest.fixture
def directory(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "disk")


def claims(directory: DirectoryStore) -> dict[str, str]:
    return {each.name: each.read_text() for each in (directory.path / ".claims").iterdir()}


def committed(directory: DirectoryStore, step: int, generation: int, content: bytes = b"part") -> CheckpointId:
    of = CheckpointId(step, generation)
    draft = directory.begin(of)
    with directory.create_file(draft, "a") as file:
        file.write(content)
    directory.commit(draft, Manifest(of, 1, {"a": FileRecord(4, "0b8f2e5d")}, {}))
    return of


def told(raised: pytest.ExceptionInfo[BaseException]) -> str:
    return str(raised.value)


def test_a_run_without_a_generation_takes_the_next(directory: DirectoryStore) -> None:
    assert [directory.claim(None), directory.claim(None), directory.claim(7), directory.claim(None)] == [1, 2, 7, 8]
    assert claims(directory) == {f"gen-00000{number}": "" for number in (1, 2, 7, 8)}
    assert directory.newest_claim() == 8
    with pytest.raises(FencedError) as raised:
        directory.claim(6)
    assert told(raised) == (
        f"generation 8 has taken over {directory.path}; this process belongs to generation 6 and must stop"
    )
    directory.check_fence(8)
    directory.check_fence(9)


def test_generations_of_a_job_that_was_applied_again_go_on_after_the_former_ones(directory: DirectoryStore) -> None:
    assert [directory.claim(1, "one"), directory.claim(2, "one"), directory.claim(2, "one")] == [1, 2, 2]
    assert [directory.claim(1, "two"), directory.claim(3, "two")] == [3, 5]
    assert claims(directory) == {
        "run-one": "0", "run-two": "2", "gen-000001": "one", "gen-000002": "one", "gen-000003": "two", "gen-000005": "two",
    }  # fmt: skip
    with pytest.raises(FencedError) as raised:
        directory.claim(3, "one")
    assert told(raised) == f"another job has taken over {directory.path}; give each job a directory of its own"
    assert directory.claim(None) == 6, "outside a pod"
    assert directory.claim(9, "one") == 9, "nobody in particular came between"


def test_a_job_whose_first_claim_failed_half_way_claims_again(
    directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage of the job that was deleted and applied again is full just when it first claims the directory."""
    assert [directory.claim(1, "one"), directory.claim(2, "one")] == [1, 2]

    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(directory, "_write", is_full)
        with pytest.raises(OSError, match="No space left on device"):
            directory.claim(1, "two")
    assert claims(directory) == {"run-one": "0", "run-two": "2", "gen-000001": "one", "gen-000002": "one"}
    assert [directory.claim(1, "two"), directory.claim(2, "two")] == [3, 4]
    with pytest.raises(FencedError):
        directory.claim(2, "one")


def test_a_job_that_crashed_before_its_mark_was_written_claims_again(directory: DirectoryStore) -> None:
    """Where there are no links, the mark is there before its content is."""
    assert directory.claim(4, "one") == 4
    (directory.path / ".claims" / "run-two").touch()
    assert [directory.claim(1, "two"), directory.claim(2, "two")] == [5, 6]
    assert claims(directory)["run-two"] == "4"


def test_a_directory_belongs_to_one_job(directory: DirectoryStore) -> None:
    directory.claim(1, job="first")
    directory.claim(2, job="first")
    directory.claim(3)
    with pytest.raises(CheckpointError) as raised:
        directory.claim(4, job="second")
    assert told(raised) == (
        f"{directory.path} holds the checkpoints of job first; give second a directory of its own, or pass adopt=True to take it "
        "over"
    )
    assert claims(directory)["job"] == "first"
    assert directory.claim(4, job="second", adopt=True) == 4
    assert claims(directory)["job"] == "second"


@pytest.mark.parametrize("run", ["a b", "ä", "x" * 129, "a/b"])
def test_an_identity_that_is_no_name_is_refused(directory: DirectoryStore, run: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        directory.claim(1, run)
    assert told(raised) == f"the job's identity {run!r} is not made of letters, digits, '.', '_' and '-'"
    assert directory.claim(1, "Az9._-" + "x" * 122) == 1


def test_a_directory_that_may_not_be_written_names_the_user(
    directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(DirectoryStore, "_prepare", refused)
    with pytest.raises(CheckpointError) as raised:
        directory.claim(1)
    assert told(raised) == (
        f"this process, of user {os.geteuid()}, may not write in {directory.path} (Permission denied); permit it, or name another "
        "directory"
    )


def test_an_identity_is_that_of_one_place(directory: DirectoryStore, tmp_path: Path) -> None:
    directory.claim(1)
    number, place = directory.identity().split(" ")
    assert re.fullmatch("[0-9a-f]{32}", number)
    assert place == str(tmp_path / "disk")
    (tmp_path / "link").symlink_to("disk")
    assert DirectoryStore(tmp_path / "link").identity() == directory.identity() == f"{number} {tmp_path / 'disk'}"


def test_what_is_no_directory_of_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as raised:
        DirectoryStore(tmp_path / "file").claim(1)
    assert told(raised) == f"{tmp_path / 'file'} is not a directory; name a directory for checkpoints"
    (tmp_path / ".metadata").touch()
    with pytest.raises(CheckpointError) as raised:
        DirectoryStore(tmp_path).claim(1)
    assert told(raised) == (
        f"{tmp_path} is itself one checkpoint, not a directory of checkpoints; name an empty directory or its parent"
    )


def test_a_claim_hides_the_drafts_of_older_generations_and_no_others(directory: DirectoryStore) -> None:
    directory.claim(1)
    old, other = directory.begin(CheckpointId(5, 1)), directory.path / ".tmp-else"
    other.mkdir()
    directory.claim(2)
    own = directory.begin(CheckpointId(6, 2))
    assert re.fullmatch(r"\.tmp-step-0000000006-gen-000002-[0-9a-f]{8}", own.name)
    directory.claim(2)
    dead = old.name.replace(".tmp-", ".dead-")
    assert sorted(each.name for each in directory.path.iterdir()) == sorted([".claims", dead, other.name, own.name])
    with pytest.raises(FencedError):
        directory.commit(old, Manifest(CheckpointId(5, 1), 1, {}, {}))
    with pytest.raises(FencedError):
        directory.begin(CheckpointId(7, 1))
    directory._delete_unfinished(1)
    assert sorted(each.name for each in directory.path.iterdir()) == sorted([".claims", other.name, own.name])
    directory._delete_unfinished(2)
    assert sorted(each.name for each in directory.path.iterdir()) == sorted([".claims", other.name])


def test_a_checkpoint_that_is_there_already_is_not_replaced(directory: DirectoryStore) -> None:
    directory.claim(1)
    of = committed(directory, 5, 1)
    with pytest.raises(CheckpointError) as raised:
        committed(directory, 5, 1)
    assert told(raised) == (
        f"cannot commit {directory.path / of.name}: Directory not empty; move what is there out of the way, or make room"
    )


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_where_there_are_no_links_a_file_is_created_once_all_the_same(
    directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    directory.claim(None)

    def refused(*_: object) -> None:
        raise OSError(number, "no links")

    monkeypatch.setattr(os, "link", refused)
    assert (directory._create(".claims/a", "first"), directory._create(".claims/a", "second")) == (True, False)
    assert claims(directory) == {"gen-000001": "", "a": "first"}
    assert directory.claim(None) == 2


def test_another_failure_to_create_is_told(directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.claim(None)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "link", broken)
    with pytest.raises(OSError, match="broken"):
        directory._create(".claims/a", "first")
    assert claims(directory) == {"gen-000001": ""}


def test_pruning_keeps_the_newest_and_every_so_many_and_nothing_damaged(directory: DirectoryStore) -> None:
    directory.claim(1)
    for step in range(1, 7):
        committed(directory, step, 1)
    directory.claim(2)
    committed(directory, 4, 2)
    directory.begin(CheckpointId(9, 2))
    directory.prune(2, 2, [CheckpointId(6, 1)], keep_every=3)
    assert directory.list_complete() == [CheckpointId(5, 1), CheckpointId(4, 2), CheckpointId(3, 1)]
    assert sorted(each.name for each in directory.path.iterdir() if each.name.startswith(".")) == [".claims"]
    assert list(claims(directory)) == ["gen-000002"]
    directory.prune(2, 1)
    assert directory.list_complete() == [CheckpointId(4, 2)]


@pytest.mark.parametrize("name", ["job", "id"])
def test_an_owner_and_an_identity_that_a_crash_left_empty_are_written_again(
    directory: DirectoryStore, name: str
) -> None:
    """Where there are no links, a file is created first and written afterwards."""
    directory.claim(None)
    (directory.path / ".claims" / name).touch()
    assert directory.claim(1, "one", job="ns/train") == 2
    assert re.fullmatch("[0-9a-f]{32} .+", directory.identity())
    assert directory.identity() == directory.identity()
    assert claims(directory)["job"] == "ns/train"


def test_a_torn_checkpoint_does_not_count_as_kept(directory: DirectoryStore) -> None:
    directory.claim(1)
    for step in range(1, 5):
        committed(directory, step, 1)
    (directory.path / CheckpointId(3, 1).name / "elastipod.json").unlink()
    directory.prune(1, 2)
    assert [each.step for each in directory.list_complete()] == [4, 3, 2]
    committed(directory, 5, 1)
    directory.prune(1, 2)
    assert [each.step for each in directory.list_complete()] == [5, 4], "it is deleted when it is old"


def test_a_torn_checkpoint_that_is_written_again_counts_as_kept(directory: DirectoryStore) -> None:
    directory.claim(1)
    for step in (1, 2):
        committed(directory, step, 1)
    (directory.path / CheckpointId(2, 1).name / "elastipod.json").unlink()
    directory.prune(1, 1)
    directory.delete_damaged(CheckpointId(2, 1), 1)
    committed(directory, 2, 1)
    directory.prune(1, 1, committed=CheckpointId(2, 1))
    assert [each.step for each in directory.list_complete()] == [2]


def test_a_draft_stays_while_the_thread_lives_that_may_still_commit_it(directory: DirectoryStore) -> None:
    directory.claim(1)
    left_behind = directory.begin(CheckpointId(1, 1))
    with a_thread_that(lambda: directory.begin(CheckpointId(2, 1))):
        (in_use,) = (each for each in directory.path.iterdir() if CheckpointId(2, 1).name in each.name)
        directory.prune(1, 1)
        assert (left_behind.exists(), in_use.exists()) == (False, True)
    directory.prune(1, 1)
    assert not in_use.exists()


def test_deleting_tells_of_each_checkpoint_that_is_gone_because_it_may_take_long(directory: DirectoryStore) -> None:
    directory.claim(1)
    for step in range(1, 6):
        committed(directory, step, 1)
    left: list[int] = []
    directory.prune(1, 2, progress=lambda: left.append(len([*directory.path.glob(".tmp-*/step-*")])))
    assert left == [2, 1, 0]


def test_what_another_version_wrote_is_neither_deleted_nor_counted(
    directory: DirectoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    directory.claim(1)
    for step in (1, 2, 3, 4):
        committed(directory, step, 1)
    theirs, torn = (directory.path / CheckpointId(step, 1).name / "elastipod.json" for step in (4, 2))
    theirs.write_text('{"format": 3}')
    torn.write_text("torn")
    with caplog.at_level(logging.WARNING):
        directory.prune(1, 1)
        directory.prune(1, 1)
    assert [each.step for each in directory.list_complete()] == [4, 3]
    assert caplog.messages == [
        f"not deleted, however old: {theirs} cannot be used: its format is 3, this library reads 2; use the version that wrote it, "
        "or another directory"
    ]


@pytest.mark.parametrize(
    ("text", "told_of"),
    [
        (None, "{folder} has no elastipod.json: it is torn or was made by something else"),
        (
            "torn",
            "{folder}/elastipod.json cannot be used: the record is not JSON: Expecting value: line 1 column 1 (char 0)",
        ),
    ],
)
def test_a_manifest_that_is_none_is_damage(directory: DirectoryStore, text: str | None, told_of: str) -> None:
    folder = directory.path / CheckpointId(1, 1).name
    folder.mkdir(parents=True)
    if text is not None:
        (folder / "elastipod.json").write_text(text)
    with pytest.raises(DamagedCheckpoint) as raised:
        directory.manifest(CheckpointId(1, 1))
    assert told(raised) == told_of.format(folder=folder)


def test_a_manifest_that_is_too_large_is_refused_before_the_commit(
    directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.claim(1)
    of = CheckpointId(1, 1)
    manifest = Manifest(of, 1, {"a": FileRecord(4, "0b8f2e5d")}, {})
    size = len(manifest.to_json())
    monkeypatch.setattr(store, "MAX_MANIFEST_BYTES", size - 1)
    draft = directory.begin(of)
    with pytest.raises(CheckpointError) as raised:
        directory.commit(draft, manifest)
    assert told(raised) == (
        f"cannot commit {directory.path / of.name}: its manifest would have {size} bytes, of {size - 1} that can be read; save "
        "smaller values in extra, or from fewer ranks, so that the state is cut into fewer pieces"
    )
    assert directory.list_complete() == []
    monkeypatch.setattr(store, "MAX_MANIFEST_BYTES", size)
    directory.commit(draft, manifest)
    assert directory.manifest(of) == manifest


def test_a_checkpoint_with_a_manifest_that_is_too_large_to_read_is_no_damage_and_never_deleted(
    directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory.claim(1)
    large, small, newest = (committed(directory, step, 1) for step in (1, 2, 3))
    path = directory.path / large.name / "elastipod.json"
    path.write_text(path.read_text().ljust(999))
    monkeypatch.setattr(store, "MAX_MANIFEST_BYTES", 998)
    with pytest.raises(CheckpointError) as raised:
        directory.manifest(large)
    assert not isinstance(raised.value, DamagedCheckpoint)
    problem = (
        f"{path} cannot be used: it has 999 bytes, and this library reads at most 998; use a version that reads more, or move "
        f"{path.parent} away to resume from the one before"
    )
    assert told(raised) == problem
    with caplog.at_level(logging.WARNING):
        directory.prune(1, 1)
    assert directory.list_complete() == [newest, large]
    assert caplog.messages == [f"not deleted, however old: {problem}"]
    assert small not in directory.list_complete()


def test_the_sums_of_twenty_million_pieces_have_room_in_a_manifest() -> None:
    """As those of a hundred models of thirty billion parameters, on 32 ranks."""
    pieces = 10_000
    sums = {str(10**11 + number): f"s{number:016x}" for number in range(pieces)}
    size = len(Manifest(CheckpointId(1, 1), 1, {"a": FileRecord(4, "0b8f2e5d", sums)}, {}).to_json())
    assert 20_000_000 * size / pieces < store.MAX_MANIFEST_BYTES


def test_a_folder_that_was_renamed_is_damage(directory: DirectoryStore) -> None:
    directory.claim(1)
    of = committed(directory, 1, 1)
    os.rename(directory.path / of.name, directory.path / CheckpointId(2, 1).name)
    with pytest.raises(DamagedCheckpoint) as raised:
        directory.manifest(CheckpointId(2, 1))
    path = directory.path / CheckpointId(2, 1).name / "elastipod.json"
    assert told(raised) == f"{path} describes {of.name}: the directory was renamed"


def test_each_file_that_is_not_as_the_manifest_says_is_named(directory: DirectoryStore) -> None:
    directory.claim(1)
    of = committed(directory, 1, 1)
    folder = directory.path / of.name
    (folder / "b").write_bytes(b"parts")
    (folder / "c").write_bytes(b"part")
    files = {
        "a": FileRecord(4, "00000000"), "b": FileRecord(4, "0b8f2e5d"), "c": FileRecord(4, "other", {"0": "s1"}),
        "d": FileRecord(4, "0b8f2e5d"), "e": FileRecord(4, "0b8f2e5d"),
    }  # fmt: skip
    found = directory.find_problems(Manifest(of, 1, files, {}), ["a", "b", "c", "d"])
    assert [each.replace(str(folder), "") for each in found] == [
        f"/a has checksum {crc_of(b'part')}, its manifest says 00000000",
        "/b has 5 bytes, its manifest says 4",
        "/d is missing",
    ]
    files["a"] = FileRecord(4, crc_of(b"part"))
    assert directory.find_problems(Manifest(of, 1, files, {}), ["a", "c"]) == []


def crc_of(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def test_parts_of_files_are_read(directory: DirectoryStore) -> None:
    directory.claim(1)
    of = committed(directory, 1, 1, b"0123")
    assert (directory.size_of(of, "a"), directory.location(of)) == (4, directory.path / of.name)
    assert [directory.read_range(of, "a", *each) for each in ((0, 4), (1, 2), (3, 9), (9, 1))] == [
        b"0123", b"12", b"3", b"",
    ]  # fmt: skip
    with pytest.raises(FileNotFoundError):
        directory.size_of(of, "b")
    directory._delete([of], 1)
    directory._delete([of], 1)
    assert directory._names("") == [".claims"]
    assert directory._names("none") == directory._names("none/deeper") == []


def test_a_large_file_is_written_back_as_it_grows(directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []
    monkeypatch.setattr(directory_store, "_FLOW", 1 << 16)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *rest: asked.append(rest))
    directory.claim(1)
    with directory.create_file(directory.begin(CheckpointId(1, 1)), "a") as file:
        for size in ((1 << 16) - 1, 1 << 16, 1 << 17):
            file.write(b"x" * size)
            file.flush()
    assert asked == [(0, (1 << 17) - 1, os.POSIX_FADV_DONTNEED), ((1 << 17) - 1, 1 << 17, os.POSIX_FADV_DONTNEED)]


def test_what_storage_has_not_taken_for_sure_is_bounded_so_that_no_sync_takes_long(
    directory: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.claim(1)
    monkeypatch.setattr(directory_store, "_SYNC_EVERY", 1 << 20)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(os.fstat(descriptor).st_size >> 10))
    with directory.create_file(directory.begin(CheckpointId(1, 1)), "part") as file:
        for _ in range(12):
            file.write(bytes(256 << 10))
    assert synced == [1024, 2048, 3072]
