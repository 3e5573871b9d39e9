"""The header of a memory image. It appears, by a rename, when the image is complete, and is removed before it is overwritten.

A process may therefore die at any moment. Headers are JSON; nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastipod.checkpoint.manifest import CheckpointId

IMAGE_FORMAT = 3
_SUMS = re.compile(r"(?:[0-9a-f]{16})*")


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """What an image holds. plan: digest of the plan that says where each chunk is; size: bytes; values: encoded, by key.

    sums: `checksum` of each block of each chunk, 16 hex digits, in the plan's order. durable: newest durable checkpoint that the
    run knew, this one itself once it is durable; a user who deletes that one has rolled back by hand. wants_durable: the
    checkpoint was to be written to durable storage too.
    """

    id: CheckpointId
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

    @property
    def name(self) -> str:
        return image_name(self.id.generation, self.rank, self.slot)

    def to_json(self) -> str:
        return json.dumps(
            {
                "format": IMAGE_FORMAT,
                "step": self.id.step,
                "generation": self.id.generation,
                "rank": self.rank,
                "slot": self.slot,
                "world_size": self.world_size,
                "plan": self.plan,
                "size": self.size,
                "sums": self.sums,
                "durable": self.durable and [self.durable.step, self.durable.generation],
                "values": dict(self.values),
                "extra": dict(self.extra),
                "wants_durable": self.wants_durable,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> ImageHeader:
        """Parse a header. Raises ValueError, KeyError or TypeError for anything else."""
        data = json.loads(text)
        if data["format"] != IMAGE_FORMAT:
            raise ValueError(f"its format is {data['format']}, this library reads {IMAGE_FORMAT}")
        if not _SUMS.fullmatch(data["sums"]):
            raise ValueError("its checksums are malformed")
        return cls(
            CheckpointId(int(data["step"]), int(data["generation"])),
            int(data["rank"]),
            int(data["slot"]),
            int(data["world_size"]),
            str(data["plan"]),
            int(data["size"]),
            str(data["sums"]),
            None if data["durable"] is None else CheckpointId(*map(int, data["durable"])),
            dict(data["values"]),
            dict(data["extra"]),
            bool(data.get("wants_durable", False)),
        )


def image_name(generation: int, rank: int, slot: int) -> str:
    return f"image-gen-{generation:06d}-rank-{rank:05d}-slot-{slot}"
