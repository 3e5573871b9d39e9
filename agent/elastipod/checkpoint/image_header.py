"""The header of a memory image. It appears, by a rename, when the image is complete, and is removed before it is overwritten.

A process may therefore die at any moment. Headers are JSON; nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from elastipod.checkpoint.manifest import CheckpointId, FileFormat
from elastipod.json_records import INLINE, JsonError, decode, encode, json_record
from elastipod.json_values import parse_json

IMAGE_FORMAT = 3
_SUMS = re.compile(r"(?:[0-9a-f]{16})*")


@json_record
@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an image holds. plan: digest of the plan that says where each chunk is; size: bytes; values: encoded, by key.

    sums: `checksum` of each block of each chunk, 16 hex digits, in the plan's order. durable: newest durable checkpoint that the
    run knew, this one itself once it is durable, or what a later run has written from this image; a user who deletes that one has
    rolled back by hand. wants_durable: the checkpoint was to be written to durable storage too. save: number of the save within its
    generation, the same on every rank; a step may be saved again.
    """

    id: Annotated[CheckpointId, INLINE]
    rank: int
    slot: int
    world_size: int
    plan: str
    size: int
    sums: str
    durable: CheckpointId | None
    values: Mapping[str, str]
    extra: Mapping[str, Any]
    wants_durable: bool = False
    save: int = 0

    @property
    def name(self) -> str:
        return image_name(self.id.generation, self.rank, self.slot)

    def to_json(self) -> str:
        return json.dumps({"format": IMAGE_FORMAT, **encode(self)})

    @classmethod
    def from_json(cls, text: str) -> ImageHeader:
        """Parse a header. Raises JsonError for anything else, other versions too."""
        data = parse_json(text)
        version = decode(FileFormat, data).format
        if version != IMAGE_FORMAT:
            raise JsonError(f"is {version}, this library reads {IMAGE_FORMAT}", ("format",))
        header = decode(cls, data)
        if not _SUMS.fullmatch(header.sums):
            raise JsonError("are malformed", ("sums",))
        return header


def image_name(generation: int, rank: int, slot: int) -> str:
    return f"image-gen-{generation:06d}-rank-{rank:05d}-slot-{slot}"
