"""What a checkpoint consists of: its identity, and the manifest that lists its files. No torch."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from elastipod.errors import CheckpointError

MANIFEST_FORMAT = 2
MANIFEST = "elastipod.json"
_CHUNK = 1 << 20


class DamagedCheckpoint(CheckpointError):
    """The content is not what was committed. Unreadable storage and files of another version raise other errors."""


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """The identity of a checkpoint: completed optimizer steps, and the generation that wrote it. Sorted as a resume prefers."""

    step: int
    generation: int

    @property
    def name(self) -> str:
        return f"step-{self.step:010d}-gen-{self.generation:06d}"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file of a checkpoint must be: its length in bytes and its CRC-32 in eight hex digits.

    checksums: of the parts that are read, by their first byte, so that a reader verifies what it uses; empty in older
    checkpoints.
    """

    size: int
    crc32: str
    checksums: Mapping[str, str] = field(default_factory=dict, compare=False)

    def as_json(self) -> dict[str, Any]:
        return {"size": self.size, "crc32": self.crc32, **({"parts": dict(self.checksums)} if self.checksums else {})}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileRecord:
        return cls(int(data["size"]), str(data["crc32"]), dict(data.get("parts", {})))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of elastipod.json. files: by name, without the manifest itself; extra: the user's own values."""

    id: CheckpointId
    world_size: int
    files: Mapping[str, FileRecord]
    extra: Mapping[str, Any]

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": MANIFEST_FORMAT,
                "step": self.id.step,
                "generation": self.id.generation,
                "world_size": self.world_size,
                "files": {name: file.as_json() for name, file in sorted(self.files.items())},
                "extra": dict(self.extra),
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Parse a manifest. Raises ValueError, KeyError or TypeError for anything else, CheckpointError for another version."""
        data = json.loads(text)
        if data["format"] != MANIFEST_FORMAT:
            raise CheckpointError(
                f"its format is {data['format']}, this library reads {MANIFEST_FORMAT}; use the version that wrote it, or another directory"
            )
        files = {name: FileRecord.from_json(file) for name, file in data["files"].items()}
        for name in files:
            if name in (".", "..") or os.path.basename(name) != name:
                raise ValueError(f"it names the file {name!r} outside its own directory")
        return cls(
            CheckpointId(int(data["step"]), int(data["generation"])),
            int(data["world_size"]),
            files,
            dict(data["extra"]),
        )


def measure_file(path: Path) -> FileRecord:
    """Return the length and CRC-32 of a file."""
    with open(path, "rb") as file:
        return measure_stream(file)


def measure_stream(file: BinaryIO) -> FileRecord:
    """Return the length and CRC-32 of the rest of an open file."""
    size = checksum = 0
    buffer = bytearray(_CHUNK)  # reused: allocating memory for each read costs as much as reading
    while count := file.readinto(buffer):  # type: ignore[attr-defined]  # as all files that are open for reading have
        size += count
        checksum = zlib.crc32(memoryview(buffer)[:count], checksum)
    return FileRecord(size, f"{checksum:08x}")
