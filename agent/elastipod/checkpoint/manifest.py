"""What a checkpoint consists of: its identity, and the manifest that lists its files. No torch."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, BinaryIO

from elastipod.errors import CheckpointError
from elastipod.json_records import INLINE, OMIT_EMPTY, JsonError, Key, decode, encode, json_record, json_row
from elastipod.json_values import parse_json

MANIFEST_FORMAT = 2
MANIFEST = "elastipod.json"
_CHUNK = 1 << 20


class DamagedCheckpoint(CheckpointError):
    """The content is not what was committed. Unreadable storage and files of another version raise other errors."""


@json_row
@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """The identity of a checkpoint: completed optimizer steps, and the generation that wrote it. Sorted as a resume prefers."""

    step: int
    generation: int

    @property
    def name(self) -> str:
        return f"step-{self.step:010d}-gen-{self.generation:06d}"


@json_record
@dataclass(frozen=True, slots=True)
class FileFormat:
    """The version of a file, which decides how the rest of it is read."""

    format: int


@json_record
@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file of a checkpoint must be: its length in bytes and its CRC-32 in eight hex digits.

    checksums: of the parts that are read, by their first byte, so that a reader verifies what it uses; empty in older
    checkpoints.
    """

    size: int
    crc32: str
    checksums: Annotated[Mapping[str, str], Key("parts"), OMIT_EMPTY] = field(default_factory=dict, compare=False)


@json_record
@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of elastipod.json. files: by name, without the manifest itself; extra: the user's own values."""

    id: Annotated[CheckpointId, INLINE]
    world_size: int
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any]

    def to_json(self) -> str:
        # Without blanks, because there is an entry for each chunk. File by file: json holds Python's lock, and training goes on.
        files = ",".join(f"{_json(name)}:{_json(encode(each))}" for name, each in sorted(self.files.items()))
        record = {"format": MANIFEST_FORMAT, **encode(replace(self, files={}))}
        members = (
            f"{_json(key)}:{{{files}}}" if key == "files" else f"{_json(key)}:{_json(record[key])}" for key in record
        )
        return f"{{{','.join(members)}}}"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse a manifest. Raises JsonError for anything else, CheckpointError for another version."""
        data = parse_json(text)
        version = decode(FileFormat, data).format
        if version != MANIFEST_FORMAT:
            raise CheckpointError(
                f"its format is {version}, this library reads {MANIFEST_FORMAT}; use the version that wrote it, or another directory"
            )
        manifest = decode(cls, data)
        for name in manifest.files:
            if name in (".", "..") or os.path.basename(name) != name:
                raise JsonError(f"names the file {name!r} outside its own directory", ("files",))
        return manifest


def measure_stream(file: BinaryIO) -> FileRecord:
    """Return the length and CRC-32 of the rest of an open file."""
    size = checksum = 0
    buffer = bytearray(_CHUNK)  # reused: allocating memory for each read costs as much as reading
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # as all files that are open for reading have
        size += count
        checksum = zlib.crc32(memoryview(buffer)[:count], checksum)
    return FileRecord(size, f"{checksum:08x}")


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
