"""How the files of a checkpoint are read and written: which calls, into which memory, and what is told of damage."""

from __future__ import annotations

import errno
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nonempty import every
from tests.unit.checkpoint.trainer import Trainer
from torch.distributed.checkpoint.metadata import MetadataIndex

from elastipod.checkpoint import CheckpointManager, dcp_format, file_source
from elastipod.checkpoint.dcp_format import ChecksumFile, write_rank_file
from elastipod.checkpoint.directory_store import DirectoryStore
from elastipod.checkpoint.file_source import FileSource, _entry_of_numbers, _payload_start
from elastipod.checkpoint.image import checksum
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.manifest import CheckpointId, DamagedCheckpoint, FileRecord
from elastipod.errors import CheckpointError

OF = CheckpointId(1, 1)


@pytest.fixture
def saved(tmp_path: Path) -> DirectoryStore:
    """Step 1 of a model of two layers."""
    with CheckpointManager(tmp_path, memory=False) as manager:
        Trainer().save(manager, 1)
    return DirectoryStore(tmp_path)


def weight(dtype: torch.dtype = torch.float32) -> LoadTarget:
    return LoadTarget((0, 0), (8, 4), torch.zeros(8, 4, dtype=dtype))


# -- reading files -----------------------------------------------------------------------------------------------------


def test_what_fits_is_read_straight_into_its_tensor(saved: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource(saved, saved.manifest(OF), 0)
    rooms: list[int] = []
    read = file_source._read_into

    def noted(file: Any, raw: torch.Tensor) -> int:
        rooms.append(raw.data_ptr())
        return read(file, raw)

    monkeypatch.setattr(file_source, "_read_into", noted)
    for targets, is_direct in (
        ([weight()], True),
        ([weight(torch.float64)], False),
        ([weight(), weight()], False),
        ([LoadTarget((0, 0), (4, 4), torch.zeros(4, 4))], False),
    ):
        assert source.fill({("model.0.weight", (0, 0)): targets}) == []
        assert (rooms.pop() == targets[0].tensor.data_ptr()) is is_direct
        assert every(
            torch.equal(each.tensor.float(), Trainer().model.get_parameter("0.weight")[: each.lengths[0]])
            for each in targets
        )


@pytest.mark.parametrize("is_cheap", [True, False])
def test_values_of_a_file_come_by_one_read_and_others_random_states_not_at_all(
    saved: DirectoryStore, monkeypatch: pytest.MonkeyPatch, is_cheap: bool
) -> None:
    manifest = saved.manifest(OF)
    reads: list[tuple[str, int, int]] = []
    read_range = DirectoryStore.read_range

    def noted(self: DirectoryStore, of: CheckpointId, name: str, start: int, length: int) -> bytes:
        assert of == OF
        reads.append((name, start, length))
        return read_range(self, of, name, start, length)

    monkeypatch.setattr(DirectoryStore, "read_range", noted)
    monkeypatch.setattr(DirectoryStore, "has_cheap_seeks", is_cheap)
    source, other = FileSource(saved, manifest, 0), FileSource(saved, manifest, 7)
    (whole, values), again = reads[:2], reads[2:]
    assert whole == again[0] == (".metadata", 0, manifest.files[".metadata"].size)
    assert (values[0], values[1] + values[2]) == ("__0_0.distcp", manifest.files["__0_0.distcp"].size)
    assert again[1][1] == values[1]
    assert again[1][2] < values[2], "the random state lies last"
    assert (source.has_value("random.0"), other.has_value("random.0")) == (True, False)
    assert source.value("optimizer.param_groups.0.lr") == other.value("optimizer.param_groups.0.lr") == 0.1
    reads.clear()
    places = {("model.0.weight", (0, 0)): [weight()], ("model.0.bias", (0,)): [LoadTarget((0,), (8,), torch.zeros(8))]}
    assert source.fill(places) == []
    assert len(reads) == (0 if is_cheap else 2), "of an object store, each entry is fetched whole"


def damaged(store: DirectoryStore, name: str, how: str, at: bytes = b"") -> None:
    path = store.path / OF.name / name
    content = bytearray(path.read_bytes())
    match how:
        case "missing":
            path.unlink()
            return
        case "short":
            del content[-1:]
        case "changed":
            content[content.index(at) if at else len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "how", "told"),
    [
        (".metadata", "missing", "/.metadata is missing"),
        (".metadata", "short", "/.metadata is too short"),
        (".metadata", "changed", "/.metadata is not as its manifest has it"),
        ("__0_0.distcp", "missing", "/__0_0.distcp is missing"),
        ("__0_0.distcp", "short", "/__0_0.distcp is too short"),
    ],
)
def test_files_that_are_not_as_they_were_are_named(saved: DirectoryStore, name: str, how: str, told: str) -> None:
    manifest = saved.manifest(OF)
    damaged(saved, name, how)
    with pytest.raises(DamagedCheckpoint) as raised:
        FileSource(saved, manifest, 0)
    assert str(raised.value) == f"{saved.path / OF.name}{told}"


def test_a_changed_value_and_a_changed_number_are_named(saved: DirectoryStore) -> None:
    manifest, folder = saved.manifest(OF), saved.path / OF.name
    source = FileSource(saved, manifest, 0)
    bias = Trainer().model.get_parameter("0.bias").detach()
    damaged(saved, "__0_0.distcp", "changed", bias.numpy().tobytes())
    found = source.fill(
        {("model.0.bias", (0,)): [LoadTarget((0,), (8,), torch.zeros(8))], ("model.0.weight", (0, 0)): [weight()]}
    )
    assert found == [f"{folder}/__0_0.distcp: model.0.bias is damaged (its sum is not that of the manifest)"]
    start = source._where[MetadataIndex("random.0")].offset
    path = folder / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[start + 40] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCheckpoint) as raised:
        FileSource(saved, manifest, 0)
    assert str(raised.value) == f"{folder}/__0_0.distcp has a value that is not as its manifest has it"
    FileSource(saved, manifest, 1)


def test_a_read_that_fails_in_torch_is_no_damage(saved: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a read failed")

    monkeypatch.setattr(torch, "load", broken)
    with pytest.raises(OSError, match="a read failed") as raised:
        FileSource(saved, saved.manifest(OF), 0)
    assert (raised.value.errno, raised.value.strerror) == (errno.EIO, "__0_0.distcp: a read failed")


def test_an_entry_that_holds_no_numbers_is_damage() -> None:
    content = io.BytesIO()
    torch.save(torch.arange(4.0), content)
    whole = content.getvalue()
    start = _payload_start(io.BytesIO(b"before" + whole), 6, len(whole))
    assert (b"before" + whole)[start : start + 16] == torch.arange(4.0).numpy().tobytes()
    values = io.BytesIO()
    torch.save([1], values)
    for directory, told in (
        (values.getvalue(), "it holds no tensor"),
        (b"none", "its directory cannot be read: BadZipFile"),
    ):
        with pytest.raises(DamagedCheckpoint) as raised:
            _entry_of_numbers(directory)
        assert str(raised.value) == told
    with pytest.raises(DamagedCheckpoint) as raised:
        _payload_start(values, 0, len(values.getvalue()))
    assert str(raised.value) == "it holds no tensor"


# -- writing files -----------------------------------------------------------------------------------------------------


class Parts(io.BytesIO):
    """Notes how much is written at once, and may fail."""

    def __init__(self, fails_after: int = 1 << 30) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.fails_after = fails_after

    def write(self, data: Any) -> int:
        if len(self.sizes) >= self.fails_after:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.sizes.append(len(data))
        return super().write(data)


@pytest.mark.parametrize("small", [1, 1 << 18], ids=["by a thread", "at once"])
def test_what_is_written_is_counted_and_summed_part_by_part(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(dcp_format, "_PART", 4)
    monkeypatch.setattr(dcp_format, "_SMALL", small)
    parts, checked = Parts(), []
    with ChecksumFile(parts, lambda: checked.append(len(parts.sizes))) as out:
        assert out.write(b"0123456789") == 10
        assert out.write(torch.tensor([1, 2], dtype=torch.int16).numpy()) == 4
        assert out.write(b"") == 0
    assert parts.sizes == [4, 4, 2, 4]
    assert checked == [0, 1, 2, 3], "before each part"
    content = b"0123456789\1\0\2\0"
    assert parts.getvalue() == content
    assert out.record() == FileRecord(14, f"{zlib.crc32(content):08x}")


def test_a_failed_write_is_told_instead_of_torchs_own_error() -> None:
    with ChecksumFile(Parts(fails_after=1)) as out, pytest.raises(OSError, match="No space left") as raised:
        out.save(torch.zeros(4))
    assert raised.value.errno == errno.ENOSPC

    def refuse() -> None:
        raise CheckpointError("given up")

    with ChecksumFile(Parts(), refuse) as out, pytest.raises(CheckpointError, match="given up"):
        out.save(torch.zeros(4))


def test_the_file_of_a_rank_holds_chunks_and_values_with_their_sums() -> None:
    file = Parts()
    room = torch.arange(12.0)
    tensors = [(5, room[2:6].reshape(2, 2)), (0, torch.zeros(0))]
    record, chunks, values = write_rank_file(file, tensors, {"a": "[1,2]", "b": '"x"'})
    content = file.getvalue()
    assert (record.size, record.crc32) == (len(content), f"{zlib.crc32(content):08x}")
    assert (list(chunks), list(values)) == (["5", "0"], ["a", "b"])
    ends = 0
    for start, length in (*chunks.values(), *values.values()):
        assert start == ends
        ends = start + length
    assert ends == len(content)

    def entry(place: list[int]) -> bytes:
        return content[place[0] : place[0] + place[1]]

    loaded = [torch.load(io.BytesIO(entry(place))) for place in (chunks["5"], chunks["0"], values["a"], values["b"])]
    assert torch.equal(loaded[0], room[2:6].reshape(2, 2))
    assert loaded[0].untyped_storage().nbytes() == 16, "nothing else of the storage"
    assert (loaded[1].numel(), *loaded[2:]) == (0, [1, 2], "x")
    assert record.checksums == {
        str(chunks["5"][0]): f"s{checksum(room[2:6].view(torch.uint8)):016x}",
        str(chunks["0"][0]): f"s{0:016x}",
        str(values["a"][0]): f"c{zlib.crc32(entry(values['a'])):08x}",
        str(values["b"][0]): f"c{zlib.crc32(entry(values['b'])):08x}",
    }


def test_the_directory_says_nothing_of_where_it_is_in_the_whole_file() -> None:
    """Python since the fix of CVE-2025-8291 refuses one whose zip64 records are elsewhere, as they are in the end of a file alone."""
    written = io.BytesIO()
    torch.save(torch.arange(4096.0), written)
    tail = written.getvalue()[-4096:]
    assert b"PK\x06\x07" in tail, "torch writes zip64 records"
    alone = file_source._directory_alone(tail)
    assert b"PK\x06\x07" not in alone
    assert b"PK\x06\x06" not in alone
    with zipfile.ZipFile(io.BytesIO(written.getvalue())) as archive:
        wanted = {each.filename: (each.header_offset, each.file_size) for each in archive.infolist()}
    with zipfile.ZipFile(io.BytesIO(alone)) as archive:
        assert {each.filename: (each.header_offset, each.file_size) for each in archive.infolist()} == wanted
