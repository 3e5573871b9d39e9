"""The files of a checkpoint, in the format of torch.distributed.checkpoint, so that torch's own readers can load them.

Each rank writes one file with its chunks and values; checksums are computed while writing, so nothing is read back. Rank 0
adds the metadata that says where each chunk is.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from elastipod.checkpoint.image import checksum
from elastipod.checkpoint.manifest import FileRecord
from elastipod.checkpoint.save_plan import ChunkIndex, SavePlan
from elastipod.checkpoint.value_codec import decode_value
from elastipod.errors import CheckpointError
from elastipod.torch_compat import storage_info

if TYPE_CHECKING:
    from elastipod.torch_compat import StorageInfo

_PART = 4 << 20
_SMALL = 1 << 18  # fewer bytes are summed faster than a thread is started

# Prefixes in `FileRecord.checksums`: sum of a chunk's bytes, CRC-32 of a value.
CHUNK_CHECKSUM, VALUE_CHECKSUM = "s", "c"

METADATA = ".metadata"  # where each tensor is; written by rank 0 when all ranks have finished


class ChecksumFile:
    """A file to write to that counts bytes and computes their CRC-32, with the methods that torch.save needs.

    The checksum detects torn or corrupted files, not forged ones. It is computed in a thread beside the writing.
    """

    def __init__(self, file: BinaryIO, check: Callable[[], None] = lambda: None) -> None:
        """check: is called before each part is written, and may raise CheckpointError to stop."""
        self._file, self._check = file, check
        self.size = self._crc32 = 0
        self._failure: OSError | CheckpointError | None = None
        self._summing = ThreadPoolExecutor(1, "elastipod-sum")

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _PART):
                part = view[start : start + _PART]
                self._check()
                summed = self._begin_sum(part)
                try:
                    self._file.write(part)
                finally:
                    if summed is not None:
                        summed.result()  # before the memory is reused
        except (OSError, CheckpointError) as error:
            self._failure = error
            raise
        self.size += len(view)
        return len(view)

    def _begin_sum(self, part: memoryview[int]) -> Future[None] | None:
        """Start to sum a part. Small parts, and all parts while Python exits and can start no thread, are summed at once."""
        if len(part) >= _SMALL:
            with suppress(RuntimeError):
                return self._summing.submit(self._sum, part)
        self._sum(part)
        return None

    def _sum(self, part: memoryview[int]) -> None:
        self._crc32 = zlib.crc32(part, self._crc32)

    def __enter__(self) -> ChecksumFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._summing.shutdown()

    def save(self, value: object) -> list[int]:
        """Write a value as torch.save does; return [first byte, bytes]. Raises OSError when the file cannot be written."""
        start = self.size
        try:
            torch.save(value, cast(IO[bytes], self))
        except RuntimeError:
            if self._failure is not None:  # torch's writer reports its position instead of the failed write
                raise self._failure from None
            raise
        return [start, self.size - start]

    def flush(self) -> None:
        self._file.flush()

    def record(self) -> FileRecord:
        return FileRecord(self.size, f"{self._crc32:08x}")


def rank_file_name(rank: int) -> str:
    return f"__{rank}_0.distcp"


def write_rank_file(
    file: BinaryIO,
    tensors: Iterable[tuple[int, torch.Tensor]],
    values: Mapping[str, str],
    check: Callable[[], None] = lambda: None,
) -> tuple[FileRecord, dict[str, list[int]], dict[str, list[int]]]:
    """Write the file of one rank: chunks by number and encoded values by key. check: as for `ChecksumFile`.

    Returns the record of the file and, for chunks (by number as text) and values (by key), [first byte, bytes].
    """
    chunks: dict[str, list[int]] = {}
    entries: dict[str, list[int]] = {}
    checksums: dict[str, str] = {}
    with ChecksumFile(file, check) as out:
        for number, tensor in tensors:
            place = chunks[str(number)] = out.save(_with_own_storage(tensor))
            checksums[str(place[0])] = format_chunk_checksum(checksum(tensor.reshape(-1).view(torch.uint8)))
        for key, text in values.items():
            content = io.BytesIO()
            torch.save(decode_value(text), content)
            entries[key] = [out.size, len(content.getbuffer())]
            checksums[str(out.size)] = f"{VALUE_CHECKSUM}{zlib.crc32(content.getbuffer()):08x}"
            out.write(content.getbuffer())
    return replace(out.record(), checksums=checksums), chunks, entries


def format_chunk_checksum(found: int) -> str:
    """Format the checksum of a chunk's bytes, as `checksum` computes it, for the manifest."""
    return f"{CHUNK_CHECKSUM}{found:016x}"


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor on the same memory whose storage holds nothing else: torch.save writes whole storages."""
    start = tensor.storage_offset() * tensor.element_size()
    storage = tensor.untyped_storage()[start : start + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, 0, tensor.shape, tensor.stride())


def dcp_metadata(plan: SavePlan) -> Metadata:
    """Return torch's description of a planned state, without locations in files."""
    described: dict[str, Any] = {}
    for chunk in plan.chunks:
        entry = described.get(chunk.key)
        if entry is None:
            properties = TensorProperties(dtype=getattr(torch, chunk.dtype))
            entry = described[chunk.key] = TensorStorageMetadata(properties, torch.Size(chunk.shape), [])
        entry.chunks.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
    paths = {chunk.key: chunk.path for chunk in plan.chunks}
    for key, path, _ in plan.values:
        described[key] = BytesStorageMetadata()
        paths[key] = path
    return Metadata(described, planner_data=paths)


def write_metadata(
    file: BinaryIO, plan: SavePlan, parts: Mapping[int, tuple[Mapping[str, list[int]], Mapping[str, list[int]]]]
) -> FileRecord:
    """Write the metadata for the files of all ranks. parts: by rank that has one, locations of chunks and values from `write_rank_file`."""
    metadata = dcp_metadata(plan)
    where: dict[MetadataIndex, StorageInfo] = {}
    for rank, (chunks, values) in parts.items():
        for number, (start, length) in chunks.items():
            chunk = plan.chunks[int(number)]
            where[MetadataIndex(chunk.key, chunk.offsets)] = storage_info(rank_file_name(rank), start, length)
        for key, (start, length) in values.items():
            where[MetadataIndex(key)] = storage_info(rank_file_name(rank), start, length)
    metadata.storage_data = where
    with ChecksumFile(file) as out:
        out.write(pickle.dumps(metadata))
    return out.record()


def chunk_index(index: MetadataIndex, metadata: Metadata) -> ChunkIndex:
    """Return the chunk that a storage index of torch's refers to."""
    if index.offset is not None:
        return index.fqn, tuple(index.offset)
    entry = metadata.state_dict_metadata[index.fqn]
    assert isinstance(entry, TensorStorageMetadata)
    return index.fqn, tuple(entry.chunks[0].offsets)


def chunk_numbers(plan: SavePlan) -> dict[ChunkIndex, int]:
    """Return the number of each chunk of a plan, by its index."""
    return {chunk.index: number for number, chunk in enumerate(plan.chunks)}
