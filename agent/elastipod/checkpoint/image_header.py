"""The header of a memory image: what the image holds, and when it may be believed."""

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
    """What an image is. plan: digest of the plan that says where in it which chunk lies; size: bytes; values: packed, by key.

    sums: `checksum` of each block of each chunk, 16 hex digits, in the plan's order. durable: newest durable checkpoint that the run knew
    to be there, this one itself once it is durable too; who deletes that one has rolled back by hand. wants_durable: it was to be
    written to durable storage too.
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
        """Read a header. Raises ValueError, KeyError or TypeError when it is none of ours."""
        data = json.loads(text)
        if data["format"] != IMAGE_FORMAT:
            raise ValueError(f"its format is {data['format']}, this library reads {IMAGE_FORMAT}")
        if not _SUMS.fullmatch(data["sums"]):
            raise ValueError("its sums are none of ours")
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
