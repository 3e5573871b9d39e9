"""Reading a state from the files of a checkpoint: once, verified as it arrives.

A chunk is verified with the checksum that its writer recorded in the manifest, in the target tensor itself if it fits there
unchanged. Files of earlier versions have no such checksums; they are verified as a whole before they are read.
"""

from __future__ import annotations

import ctypes
import errno
import io
import pickle
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from elastipod.checkpoint.dcp_format import METADATA, VALUE_CHECKSUM, format_chunk_checksum
from elastipod.checkpoint.image import CHECKSUM_BLOCK, checksum, view_as_chunk
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.manifest import DamagedCheckpoint, Manifest
from elastipod.checkpoint.save_plan import Chunk, ChunkIndex, num_bytes
from elastipod.checkpoint.store import CheckpointStore
from elastipod.checkpoint.training_state import RANDOM

if TYPE_CHECKING:
    from elastipod.torch_compat import StorageInfo

_STREAMS = 8  # reads of an object store at once
# The end of a zip file: signature, disks, entries (2), bytes and offset of the directory, comment; and zip64's, with versions.
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_BYTES = 20  # between the two
_DIRECTORY_BYTES = 4096  # at the end of a tensor's zip file; they contain its directory
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip file's entry, up to the lengths of its name and its extra fields


class FileSource:
    """A state in the files of a checkpoint. Methods raise DamagedCheckpoint for damage, OSError when storage fails."""

    def __init__(self, store: CheckpointStore, manifest: Manifest, rank: int) -> None:
        """Read the metadata, and the plain values that this rank needs."""
        self._store, self._manifest, self._id = store, manifest, manifest.id
        content = self._read(METADATA, 0, manifest.files[METADATA].size) if METADATA in manifest.files else b""
        if f"{zlib.crc32(content):08x}" != manifest.files[METADATA].crc32:
            raise DamagedCheckpoint(f"{store.location(self._id)}/{METADATA} is not as its manifest has it")
        self.metadata: Metadata = pickle.loads(content)  # noqa: S301  # its checksum is that of the manifest
        self._where: Mapping[MetadataIndex, StorageInfo] = dict(self.metadata.storage_data)
        self._values = self._read_values(rank)

    def has_value(self, key: str) -> bool:
        return key in self._values

    def value(self, key: str) -> Any:
        return self._values[key]

    def fill(self, wanted: Mapping[ChunkIndex, Sequence[LoadTarget]]) -> list[str]:
        """Fill live tensors; return one sentence for each damaged chunk."""
        problems: list[str] = []
        by_file: dict[str, list[tuple[StorageInfo, ChunkIndex]]] = {}
        for place in wanted:
            info = self._where[MetadataIndex(*place)]
            by_file.setdefault(info.relative_path, []).append((info, place))
        for name in sorted(by_file):
            entries = sorted(by_file[name], key=lambda each: each[0].offset)
            with self._views(name, [info for info, _ in entries]) as views:
                for (info, place), (file, start) in zip(entries, views, strict=True):
                    try:
                        self._fill_chunk(file, start, info, self._chunk(place), wanted[place])
                    except (DamagedCheckpoint, struct.error, EOFError) as error:
                        problems.append(f"{self._store.location(self._id)}/{name}: {place[0]} is damaged ({error})")
        return problems

    def _fill_chunk(
        self, file: BinaryIO, start: int, info: StorageInfo, chunk: Chunk, targets: Sequence[LoadTarget]
    ) -> None:
        """Fill the targets of one chunk. start: of its entry in the file."""
        if not chunk.num_bytes:
            return
        file.seek(_payload_start(file, start, info.length))
        memory = (
            targets[0].direct_view(chunk)
            if len(targets) == 1 and targets[0].byte_range(chunk) == (0, chunk.num_bytes)
            else None
        )
        raw = torch.empty(chunk.num_bytes, dtype=torch.uint8, device="cpu") if memory is None else memory
        found = _read_into(file, raw)
        wanted = self._manifest.files[info.relative_path].checksums.get(str(info.offset))
        if wanted is not None and wanted != format_chunk_checksum(found):
            raise DamagedCheckpoint("its sum is not that of the manifest")
        if memory is None:
            for target in targets:
                target.fill(view_as_chunk(raw, chunk))

    def _chunk(self, place: ChunkIndex) -> Chunk:
        key, offsets = place
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        sizes = next(tuple(each.sizes) for each in entry.chunks if tuple(each.offsets) == offsets)
        dtype = entry.properties.dtype
        name = str(dtype).removeprefix("torch.")
        return Chunk(key, (), name, tuple(entry.size), offsets, sizes, num_bytes(sizes, dtype.itemsize))

    @contextmanager
    def _views(self, name: str, infos: Sequence[StorageInfo]) -> Iterator[Iterator[tuple[BinaryIO, int]]]:
        """Yield, for each entry, a file and where the entry begins in it.

        From a remote store, several entries are fetched at once.
        """
        if self._store.has_cheap_seeks:
            with self._store.open_file(self._id, name) as file:
                yield ((file, info.offset) for info in infos)
            return
        with ThreadPoolExecutor(_STREAMS, "elastipod-checkpoint-read") as streams:

            def fetched() -> Iterator[tuple[BinaryIO, int]]:
                coming: deque[Future[bytes]] = deque()
                left = deque(infos)
                while left or coming:
                    while left and len(coming) < _STREAMS:
                        info = left.popleft()
                        coming.append(streams.submit(self._read, name, info.offset, info.length))
                    yield io.BytesIO(coming.popleft().result()), 0

            yield fetched()

    def _read_values(self, rank: int) -> dict[str, Any]:
        """Read the plain values, without other ranks' random states. Those of one file are adjacent and come by one read."""
        wanted: dict[str, list[tuple[StorageInfo, str]]] = {}
        for key, entry in self.metadata.state_dict_metadata.items():
            is_others = key.startswith(f"{RANDOM}.") and key != f"{RANDOM}.{rank}"
            info = self._where.get(MetadataIndex(key))
            if isinstance(entry, BytesStorageMetadata) and info is not None and not is_others:
                wanted.setdefault(info.relative_path, []).append((info, key))
        values: dict[str, Any] = {}
        for name, entries in wanted.items():
            start = min(info.offset for info, _ in entries)
            content = self._read(name, start, max(info.offset + info.length for info, _ in entries) - start)
            for info, key in entries:
                values[key] = self._value(name, info, content[info.offset - start :][: info.length])
        return values

    def _value(self, name: str, info: StorageInfo, content: bytes) -> Any:
        wanted = self._manifest.files[name].checksums.get(str(info.offset))
        if wanted is not None and wanted != f"{VALUE_CHECKSUM}{zlib.crc32(content):08x}":
            raise DamagedCheckpoint(
                f"{self._store.location(self._id)}/{name} has a value that is not as its manifest has it"
            )
        try:
            return torch.load(cast(IO[bytes], io.BytesIO(content)), map_location="cpu", weights_only=True)
        except RuntimeError as error:  # raised by torch when a read fails: the checksums were right
            raise OSError(errno.EIO, f"{name}: {error}") from error

    def _read(self, name: str, start: int, length: int) -> bytes:
        try:
            content = self._store.read_range(self._id, name, start, length)
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{self._store.location(self._id)}/{name} is missing") from None
        if len(content) != length:
            raise DamagedCheckpoint(f"{self._store.location(self._id)}/{name} is too short")
        return content


def _payload_start(file: BinaryIO, start: int, length: int) -> int:
    """Return where the numbers of a tensor begin in what torch.save wrote: an uncompressed zip file of ``length`` bytes."""
    skipped = max(0, length - _DIRECTORY_BYTES)
    file.seek(start + skipped)
    header = _entry_of_numbers(file.read(length - skipped)).header_offset
    if not 0 <= header <= length - _LOCAL_HEADER.size:
        raise DamagedCheckpoint("its directory points elsewhere")
    file.seek(start + header)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return start + header + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


def _entry_of_numbers(tail: bytes) -> zipfile.ZipInfo:
    """Return the entry that holds the numbers. tail: the end of the zip file; offsets count from its beginning."""
    try:
        with zipfile.ZipFile(io.BytesIO(_directory_alone(tail))) as archive:
            entry = next((each for each in archive.infolist() if each.filename.endswith("/data/0")), None)
    except Exception as error:  # zipfile raises many errors for damaged bytes; nothing is read from storage here
        raise DamagedCheckpoint(f"its directory cannot be read: {type(error).__name__}") from error
    if entry is None:
        raise DamagedCheckpoint("it holds no tensor")
    return entry


def _directory_alone(tail: bytes) -> bytes:
    """Return the directory at the end of a zip file as one of its own, without zip64's records.

    Those say where they are in the whole file, and Python since the fix of CVE-2025-8291 refuses a file where they are elsewhere.
    """
    last = tail[-_END.size :]
    if len(last) < _END.size or not last.startswith(b"PK\x05\x06"):
        raise zipfile.BadZipFile("it does not end with a directory")
    _, _, _, _, num_entries, size, _, _ = _END.unpack(last)
    end = len(tail) - _END.size
    if tail[end - _LOCATOR_BYTES :].startswith(b"PK\x06\x07"):
        end -= _LOCATOR_BYTES + _END64.size
        record = _END64.unpack(tail[end : end + _END64.size])
        num_entries, size = record[7], record[8]
    if not 0 < size <= end:
        raise zipfile.BadZipFile("the directory is not there")
    return tail[end - size : end] + _END.pack(b"PK\x05\x06", 0, 0, num_entries, num_entries, size, 0, 0)


def _read_into(file: BinaryIO, raw: torch.Tensor) -> int:
    """Read the bytes of a tensor from a file; return their checksum, computed while they are in the processor's cache."""
    buffer = memoryview((ctypes.c_char * raw.numel()).from_address(raw.data_ptr())).cast("B")
    total = 0
    for start in range(0, raw.numel(), CHECKSUM_BLOCK):
        end = min(start + CHECKSUM_BLOCK, raw.numel())
        at = start
        while at < end:
            count = file.readinto(buffer[at:end])  # type: ignore[attr-defined]  # as all files that are open for reading have
            if not count:
                raise EOFError("the file ends too early")
            at += count
        total += checksum(raw[start:end])
    return total % (1 << 64)
