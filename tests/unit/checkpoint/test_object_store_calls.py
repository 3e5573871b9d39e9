"""What an object store is asked, call for call, and what is made of its answers."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.nonempty import some
from tests.patience import PATIENCE_S
from tests.unit.checkpoint.other_thread import a_thread_that

fsspec = pytest.importorskip("fsspec")

from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]  # noqa: E402

from elastipod.checkpoint.bucket_store import BucketStore  # noqa: E402
from elastipod.checkpoint.manifest import CheckpointId, DamagedCheckpoint, FileRecord, Manifest  # noqa: E402
from elastipod.errors import CheckpointError, FencedError  # noqa: E402

OF = CheckpointId(7, 2)
AT = "/bucket/x/step-0000000007-gen-000002"
MIB = 1 << 20
CLAIMS = [("invalidate_cache",), ("ls", "/bucket/x/.claims", {"detail": False})]
MANIFEST = Manifest(OF, 1, {name: FileRecord(4, "0" * 8) for name in ("__0_0.distcp", ".metadata")}, {})
LISTING = [("invalidate_cache",), ("ls", "/bucket/x", {"detail": False})]
BARRIER = '{"barrier": "generation 3 has taken over"}'


class Asked:
    """A file system that notes the calls, and answers some of them itself."""

    def __init__(self, real: Any, answers: dict[str, Any], protocol: Any = "memory") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers = answers
        self.protocol = protocol
        self._real = real

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, *given, *([named] if named else [])))
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return getattr(self._real, name)(*given, **named) if answer is None else answer

        return call


@pytest.fixture(autouse=True)
def emptied() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def asked() -> Asked:
    return Asked(MemoryFileSystem(), {})


@pytest.fixture
def store(asked: Asked) -> BucketStore:
    found = BucketStore("memory://bucket/x/", {})
    found._fs = asked
    return found


def put(name: str, content: bytes | str = b"") -> None:
    MemoryFileSystem().pipe_file(f"/bucket/x/{name}", content.encode() if isinstance(content, str) else content)


def there() -> list[str]:
    return sorted(name.removeprefix("/bucket/x/") for name in MemoryFileSystem.store)


def test_a_checkpoint_is_begun_written_and_committed_by_these_calls(store: BucketStore, asked: Asked) -> None:
    draft = store.begin(OF)
    assert draft == "step-0000000007-gen-000002"
    assert asked.calls == [("makedirs", AT, {"exist_ok": True}), ("pipe_file", f"{AT}/begun", b""), *CLAIMS]
    asked.calls.clear()
    with store.create_file(draft, "__0_0.distcp") as file:
        file.write(b"part")
    assert asked.calls == [("open", f"{AT}/__0_0.distcp", "wb", {"block_size": 16 * MIB})]
    asked.calls.clear()
    assert store.commit(draft, MANIFEST) == "memory://bucket/x/step-0000000007-gen-000002"
    text = MANIFEST.to_json().encode()
    assert asked.calls == [
        *CLAIMS,
        ("makedirs", AT, {"exist_ok": True}),
        ("pipe_file", f"{AT}/elastipod.json", text, {"mode": "create"}),
    ]
    assert MemoryFileSystem.store[f"{AT}/__0_0.distcp"].getvalue() == b"part"


def test_a_checkpoint_is_read_by_these_calls(store: BucketStore, asked: Asked) -> None:
    put(f"{OF.name}/part", b"0123456789")
    put(f"{OF.name}/elastipod.json", MANIFEST.to_json())
    with store.open_file(OF, "part") as file:
        assert file.read(3) == b"012"
    assert store.read_range(OF, "part", 2, 3) == b"234"
    assert store.read_range(OF, "part", 8, 9) == b"89"
    assert store.read_range(OF, "part", 2, 0) == b""
    assert store.size_of(OF, "part") == 10
    assert store.manifest(OF) == MANIFEST
    assert asked.calls == [
        ("open", f"{AT}/part", "rb", {"block_size": 16 * MIB}),
        ("cat_file", f"{AT}/part", {"start": 2, "end": 5}),
        ("cat_file", f"{AT}/part", {"start": 8, "end": 17}),
        ("info", f"{AT}/part", {"refresh": True}),
        ("info", f"{AT}/elastipod.json", {"refresh": True}),
        ("cat_file", f"{AT}/elastipod.json"),
    ]
    with pytest.raises(FileNotFoundError):
        store.size_of(OF, "missing")


@pytest.mark.parametrize("delete", [lambda store: store.discard(OF.name), lambda store: store._delete([OF], 3)])
def test_a_checkpoint_is_deleted_from_its_manifest_on(
    store: BucketStore, asked: Asked, delete: Callable[[BucketStore], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "check_fence", lambda generation: None)
    for name in ("begun", "part", "elastipod.json"):
        put(f"{OF.name}/{name}")
    put("step-0000000007-gen-000003/begun")
    delete(store)
    assert asked.calls == [("rm_file", f"{AT}/elastipod.json"), ("rm", AT, {"recursive": True})]
    assert there() == ["step-0000000007-gen-000003/begun"]
    delete(store)  # what is not there any more is no failure


def test_a_replaced_generation_deletes_no_checkpoint(store: BucketStore) -> None:
    for name in (f"{OF.name}/part", f"{OF.name}/elastipod.json", ".claims/gen-000004"):
        put(name)
    before = there()
    with pytest.raises(FencedError):
        store._delete([OF], 3)
    assert there() == before


def test_a_claim_asks_for_its_place_and_fences_older_drafts_off(store: BucketStore, asked: Asked) -> None:
    for name in ("step-0000000001-gen-000001", "step-0000000002-gen-000002", "step-0000000003-gen-000003", "notes"):
        put(f"{name}/begun")
    put("step-0000000001-gen-000001/elastipod.json", MANIFEST.to_json())
    assert store.claim(3) == 3
    looked_at = sorted(call[1] for call in asked.calls if call[0] == "info")
    assert looked_at == [f"/bucket/x/step-000000000{n}-gen-00000{n}/elastipod.json" for n in (1, 2, 3)]
    asked_for = [call for call in asked.calls if "probe-" not in str(call) and call[0] != "info"]
    assert asked_for == [
        ("exists", "/bucket/x/.metadata"),
        ("exists", "/bucket/x/elastipod.json"),
        *[("makedirs", "/bucket/x/.claims", {"exist_ok": True})] * 2,
        *CLAIMS,
        ("makedirs", "/bucket/x/.claims", {"exist_ok": True}),
        ("pipe_file", "/bucket/x/.claims/gen-000003", b""),
        *LISTING,
        ("makedirs", "/bucket/x/step-0000000002-gen-000002", {"exist_ok": True}),
        ("pipe_file", "/bucket/x/step-0000000002-gen-000002/elastipod.json", BARRIER.encode(), {"mode": "create"}),
    ]
    probe, again, removed = [call for call in asked.calls if "probe-" in str(call)]
    assert (probe[0], probe[2:], again[2:]) == (
        "pipe_file",
        (b"first", {"mode": "create"}),
        (b"second", {"mode": "create"}),
    )
    assert probe[1] == again[1] == removed[1]
    assert len(probe[1]) == len("/bucket/x/.claims/probe-") + 8
    assert removed[0] == "rm_file"
    assert MemoryFileSystem.store["/bucket/x/step-0000000001-gen-000001/elastipod.json"].getvalue() != BARRIER.encode()
    assert there() == [
        ".claims/gen-000003", "notes/begun", "step-0000000001-gen-000001/begun", "step-0000000001-gen-000001/elastipod.json",
        "step-0000000002-gen-000002/begun", "step-0000000002-gen-000002/elastipod.json", "step-0000000003-gen-000003/begun",
    ]  # fmt: skip
    with pytest.raises(FencedError):
        store.commit("step-0000000002-gen-000002", MANIFEST)


def test_what_is_no_draft_or_not_ours_is_not_listed_and_not_deleted(store: BucketStore, asked: Asked) -> None:
    """A barrier has at most 64 bytes and is read; what is longer is a manifest."""
    put("notes/elastipod.json", "x" * 100)
    put("step-0000000001-gen-000001/elastipod.json", "x" * 65)
    put("step-0000000002-gen-000001/elastipod.json", BARRIER.ljust(64))
    put("step-0000000003-gen-000001/elastipod.json", "x" * 64)
    put("step-0000000004-gen-000002/begun")
    put("step-0000000005-gen-000003/begun")
    put("step-0000000006-gen-000001/elastipod.json")
    found = {of.step: is_complete for of, is_complete in store._written()}
    assert found == {1: True, 2: False, 3: True, 4: False, 5: False, 6: True}
    at = {of.step: f"/bucket/x/{of.name}/elastipod.json" for of, _ in store._written()}
    first, again = asked.calls[:11], asked.calls[11:]
    for calls in (first, again):
        assert calls[:2] == LISTING
        assert sorted(call[:2] for call in calls[2:]) == sorted(
            [("info", at[step]) for step in range(1, 7)] + [("cat_file", at[step]) for step in (2, 3, 6)]
        ), "what was complete once is looked at again"
    assert store.list_complete() == [CheckpointId(step, 1) for step in (6, 3, 1)]
    store._delete_unfinished(2)
    assert {of.step for of, _ in store._written()} == {1, 3, 5, 6}


def test_a_save_asks_for_the_manifests_however_many_files_there_are(store: BucketStore, asked: Asked) -> None:
    claimed: list[list[str]] = []
    for generation, files in ((1, 1), (2, 100)):
        for number in range(files):
            put(f"{CheckpointId(0, 0).name}/__{number}_0.distcp")
        put(f"{CheckpointId(0, 0).name}/elastipod.json", "x" * 65)
        store.claim(generation)
        asked.calls.clear()
        of = CheckpointId(500, generation)
        assert of not in store.list_complete()
        store.commit(store.begin(of), Manifest(of, 1, MANIFEST.files, {}))
        assert store.list_complete()[0] == of
        store._delete_unfinished(generation)
        store._delete([of], generation)
        claimed.append([name for name, *_ in asked.calls])
    assert claimed[0] == claimed[1]
    assert claimed[0].count("ls") == 6, "three listings, and three checks for newer claims"
    assert claimed[0].count("info") == 5, "one of a checkpoint and two of two"
    assert not {"find", "cat_file"}.intersection(claimed[0])


def test_a_checkpoint_whose_manifest_another_process_deleted_is_none_any_more(store: BucketStore) -> None:
    """An older generation may delete even after a claim of this one, manifest first."""
    for step in (6, 7, 8):
        put(f"{CheckpointId(step, 2).name}/part")
        put(
            f"{CheckpointId(step, 2).name}/elastipod.json",
            Manifest(CheckpointId(step, 2), 1, MANIFEST.files, {}).to_json(),
        )
    store.claim(2)
    assert [each.step for each in store.list_complete()] == [8, 7, 6]
    MemoryFileSystem().rm_file(f"/bucket/x/{CheckpointId(8, 2).name}/elastipod.json")
    assert [each.step for each in store.list_complete()] == [7, 6], "its files are still there"
    store.prune(2, 1)
    assert [each.step for each in store.list_complete()] == [7], "what is half deleted does not count as kept"


def test_a_draft_stays_while_the_thread_lives_that_may_still_commit_it(store: BucketStore) -> None:
    store.claim(2)
    store.begin(CheckpointId(1, 2))
    with a_thread_that(lambda: store.begin(CheckpointId(2, 2))):
        store.prune(2, 1)
        assert there() == [".claims/gen-000002", "step-0000000002-gen-000002/begun"]
    store.prune(2, 1)
    assert there() == [".claims/gen-000002"]


def test_deleting_tells_of_each_checkpoint_that_is_gone_because_it_may_take_long(store: BucketStore) -> None:
    store.claim(2)
    for step in range(1, 5):
        of = CheckpointId(step, 2)
        put(f"{of.name}/elastipod.json", Manifest(of, 1, MANIFEST.files, {}).to_json())
    left: list[int] = []
    store.prune(2, 2, progress=lambda: left.append(len(there()) - 1))
    assert left == [3, 2]


def test_a_process_can_end_while_storage_does_not_answer_a_listing(store: BucketStore, asked: Asked) -> None:
    """Python waits for the threads of a pool before it ends."""
    for step in (1, 2):
        put(f"{CheckpointId(step, 2).name}/elastipod.json", "x" * 65)
    began, release = threading.Semaphore(0), threading.Event()

    def info(*_: object, **__: object) -> dict[str, int]:
        began.release()
        assert release.wait(PATIENCE_S)
        return {"size": 65}

    before = set(threading.enumerate())
    asked.info = info  # type: ignore[attr-defined]
    with a_thread_that(store.list_complete, waits=False) as listing:
        for _ in range(2):
            assert began.acquire(timeout=PATIENCE_S)
        found = {*threading.enumerate()} - before - {listing}
        release.set()
    assert [each.daemon for each in found] == [True]


def test_what_another_process_deleted_is_not_known_any_more(store: BucketStore) -> None:
    put(f"{OF.name}/elastipod.json", MANIFEST.to_json())
    assert store.list_complete() == [OF]
    MemoryFileSystem().rm(f"/bucket/x/{OF.name}", recursive=True)
    assert store.list_complete() == []
    put(f"{OF.name}/begun")
    assert store.list_complete() == [], "it has been begun again"


@pytest.mark.parametrize("remove", [lambda store: store.discard(OF.name), lambda store: store._delete([OF], 3)])
def test_what_was_deleted_half_way_is_unfinished(
    store: BucketStore, asked: Asked, remove: Callable[[BucketStore], None]
) -> None:
    put(f"{OF.name}/elastipod.json", MANIFEST.to_json())
    put(f"{OF.name}/part")
    assert store.list_complete() == [OF]
    asked.answers = {"rm": OSError(errno.EIO, "no")}
    with pytest.raises(OSError, match="no"):
        remove(store)
    asked.answers = {}
    assert dict(store._written()) == {OF: False}


def test_a_manifest_that_vanishes_while_it_is_looked_at_is_none(store: BucketStore, asked: Asked) -> None:
    put(f"{OF.name}/elastipod.json", "short")
    asked.answers = {"cat_file": FileNotFoundError()}
    assert dict(store._written()) == {OF: False}
    asked.answers = {"ls": FileNotFoundError()}
    assert list(store._written()) == []


def test_where_no_thread_can_start_any_more_checkpoints_are_looked_at_one_after_the_other(
    store: BucketStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(*_: object) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr("threading.Thread.start", ends)
    for step in (1, 2, 3):
        put(f"{CheckpointId(step, 1).name}/elastipod.json", MANIFEST.to_json())
    assert [of.step for of in store.list_complete()] == [3, 2, 1]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("size", "part"),
    [
        pytest.param(0, 16 * MIB, id="unknown"),
        pytest.param(9000 * 16 * MIB, 16 * MIB, id="9,000 of the usual parts"),
        pytest.param(9000 * 16 * MIB + 1, 17 * MIB, id="one byte more"),
        pytest.param(1024 * GIB, 117 * MIB, id="a tebibyte"),
    ],
)
def test_a_large_file_is_sent_in_larger_parts(store: BucketStore, asked: Asked, size: int, part: int) -> None:
    """S3 takes 10,000 of them."""
    with store.create_file(OF.name, "a", size):
        pass
    assert asked.calls == [("open", f"{AT}/a", "wb", {"block_size": part})]


def test_names_of_folders_may_end_with_a_slash(store: BucketStore, asked: Asked) -> None:
    asked.answers = {"ls": ["bucket/x/one/", "bucket/x/two", "x/"]}
    assert store._names("") == ["one", "two", "x"]
    asked.answers = {"ls": FileNotFoundError()}
    assert store._names("sub") == []
    assert asked.calls[-1] == ("ls", "/bucket/x/sub", {"detail": False})


def test_a_write_that_was_repeated_by_the_client_is_our_own(store: BucketStore) -> None:
    put(f"{OF.name}/elastipod.json", MANIFEST.to_json())
    assert store.commit(OF.name, MANIFEST) == "memory://bucket/x/step-0000000007-gen-000002"
    put(f"{OF.name}/elastipod.json", "of somebody else")
    with pytest.raises(CheckpointError) as raised:
        store.commit(OF.name, MANIFEST)
    assert str(raised.value) == (
        "cannot commit memory://bucket/x/step-0000000007-gen-000002: another writer was there first"
    )


class OddChecksumError(Exception):
    """As a client's own."""


@pytest.mark.parametrize(
    ("answer", "raised", "told"),
    [
        pytest.param(KeyError("x"), OSError, f"[Errno {errno.EIO}] KeyError: 'x'", id="an error of the client's own"),
        pytest.param(TimeoutError("slow"), TimeoutError, "slow", id="an error of the system"),
        pytest.param(CheckpointError("no"), CheckpointError, "no", id="our own"),
        pytest.param(OddChecksumError("5 is not 6"), DamagedCheckpoint, "the store's client has found damage: 5 is not 6", id="a sum"),
    ],
)  # fmt: skip
def test_errors_of_a_client_are_told_as_the_systems(
    store: BucketStore, asked: Asked, answer: Exception, raised: type[Exception], told: str
) -> None:
    asked.answers = dict.fromkeys(
        ("open", "cat_file", "info", "exists", "find", "ls", "pipe_file", "rm", "rm_file"), answer
    )
    asks: list[Callable[[], object]] = [
        lambda: store.create_file(OF.name, "a").__enter__(),
        lambda: store.open_file(OF, "a").__enter__(),
        lambda: store.read_range(OF, "a", 0, 1),
        lambda: store.size_of(OF, "a"),
        store._prepare,
        lambda: list(store._written()),
        lambda: store._names(""),
        lambda: store._read("a"),
        lambda: store._write("a", "b"),
        lambda: store._create("a", "b"),
        lambda: store._remove("a"),
        lambda: store._delete_folder("a"),
    ]
    for ask in some(asks):
        with pytest.raises(raised) as found:
            ask()
        assert (type(found.value), str(found.value)) == (raised, told)


@pytest.mark.parametrize(
    ("number", "exists", "is_new"),
    [(errno.EINVAL, True, False), (errno.EINVAL, False, None), (errno.EIO, True, None), (errno.EEXIST, False, False)],
)
def test_how_a_store_says_that_a_file_exists(
    store: BucketStore, asked: Asked, number: int, exists: bool, is_new: bool | None
) -> None:
    asked.answers = {"pipe_file": OSError(number, "no"), "exists": exists}
    if is_new is None:
        with pytest.raises(OSError, match="no"):
            store._create("a/b", "text")
    else:
        assert store._create("a/b", "text") is is_new
    assert [call for call in asked.calls if call[0] == "exists"] == (
        [("exists", "/bucket/x/a/b")] if number == errno.EINVAL else []
    )


@pytest.mark.parametrize("protocol", ["s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", ("other", "s3"), "memory"])
def test_folders_are_made_only_where_there_are_any(store: BucketStore, asked: Asked, protocol: str) -> None:
    asked.protocol = protocol
    store._write("a/b", "ü")
    made = [("makedirs", "/bucket/x/a", {"exist_ok": True})] if protocol == "memory" else []
    assert asked.calls == [*made, ("pipe_file", "/bucket/x/a/b", "ü".encode())]
    assert store._read("a/b") == "ü"


@pytest.mark.parametrize("name", [".metadata", "elastipod.json"])
def test_a_checkpoint_is_no_place_for_checkpoints(store: BucketStore, name: str) -> None:
    put(name)
    with pytest.raises(CheckpointError) as raised:
        store.claim(None)
    assert str(raised.value) == (
        "memory://bucket/x is itself one checkpoint, not a folder of checkpoints; name an empty folder or its parent"
    )


def test_a_store_without_conditions_is_refused_and_left_clean(store: BucketStore, asked: Asked) -> None:
    asked.answers = {"pipe_file": 0}  # takes both
    with pytest.raises(CheckpointError) as raised:
        store.claim(None)
    assert str(raised.value) == (
        "memory://bucket/x lets an existing file be created again, so that a replaced run could overwrite its successor's "
        "checkpoints; use a store that refuses this, and a release of its fsspec package that requests it"
    )
    assert asked.calls[-1][0] == "rm_file"


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("nosuch://bucket/x/?a=b#c", "nosuch://bucket/x cannot be used: Protocol not known: nosuch"),
        (
            "s3://me:secret@bucket/x/y/?token=1",
            "give the credentials for s3://bucket/x/y in storage_options, not in its address",
        ),
    ],
)
def test_an_address_is_refused_without_its_secrets(address: str, told: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        BucketStore(address, {})
    assert str(raised.value) == told


def test_options_go_to_the_file_system_and_nowhere_else() -> None:
    given: list[dict[str, Any]] = []

    class Noted(MemoryFileSystem):  # type: ignore[misc]
        protocol = "noted"

        def __init__(self, **options: Any) -> None:
            given.append(options)
            super().__init__()

    fsspec.register_implementation("noted", Noted, clobber=True)
    store = BucketStore("noted://bucket/x", {"key": "me", "secret": "s"})
    assert given[-1] == {"key": "me", "secret": "s"}
    assert (store.name, store._canonical_name(), store.location(OF)) == (
        "noted://bucket/x", "noted://bucket/x", "noted://bucket/x/step-0000000007-gen-000002",
    )  # fmt: skip
