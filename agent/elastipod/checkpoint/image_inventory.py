"""Checkpoints in memory: what all nodes have, and which images make a whole that may be resumed from."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastipod.checkpoint.image_header import ImageHeader, image_name
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One image that a node has. node: which; saved_rank: of the run that wrote it; plan: its plan's digest.

    durable: as its header has it.
    """

    node: str
    id: CheckpointId
    saved_rank: int
    slot: int
    plan: str
    durable: CheckpointId | None = None

    @classmethod
    def of(cls, node: str, header: ImageHeader) -> ImageInfo:
        return cls(node, header.id, header.rank, header.slot, header.plan, header.durable)

    def is_of(self, header: ImageHeader) -> bool:
        """Tell whether a header is of this image still, and not of a later one in the same slot."""
        return (self.id, self.saved_rank, self.slot, self.plan) == (header.id, header.rank, header.slot, header.plan)

    def as_json(self) -> list[Any]:
        durable = self.durable and [self.durable.step, self.durable.generation]
        return [self.node, self.id.step, self.id.generation, self.saved_rank, self.slot, self.plan, durable]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> ImageInfo:
        node, step, generation, saved_rank, slot, plan, durable = data
        return cls(
            node, CheckpointId(step, generation), saved_rank, slot, plan, CheckpointId(*durable) if durable else None
        )

    @property
    def name(self) -> str:
        return image_name(self.id.generation, self.saved_rank, self.slot)


@dataclass(frozen=True, slots=True)
class ImageInventory:
    """What all nodes have in memory, the same on every rank. nodes: by present rank, empty where it has no memory."""

    nodes: tuple[str, ...]
    found: tuple[ImageInfo, ...]

    def as_json(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "found": [each.as_json() for each in self.found]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ImageInventory:
        return cls(tuple(data["nodes"]), tuple(map(ImageInfo.from_json, data["found"])))

    def candidates(self, before: int) -> list[CheckpointId]:
        """List what older generations than ``before`` have left, freshest first; whether it is whole is not known yet."""
        return sorted({each.id for each in self.found if each.id.generation < before}, reverse=True)

    def durable_checkpoint_of(self, of: CheckpointId) -> CheckpointId | None:
        """Give the newest durable checkpoint that was there when a checkpoint in memory stood, itself if it is one."""
        return max((each.durable for each in self.found if each.id == of and each.durable), default=None)

    def durable_was_deleted(self, of: CheckpointId, durable: Collection[CheckpointId]) -> bool:
        """Tell whether the durable checkpoint that one in memory goes with was deleted since, as a roll-back by hand does.

        A save deletes it only when there is a newer one, and notes that one in the images. durable: those there now.
        """
        known = self.durable_checkpoint_of(of)
        return known is not None and known not in durable

    def without(self, bad: Collection[ImageInfo]) -> ImageInventory:
        return replace(self, found=tuple(each for each in self.found if each not in bad))

    def images(self, of: CheckpointId) -> list[ImageInfo]:
        """Give the images of one checkpoint; all of one plan, which is the one that most of them have."""
        there = [each for each in self.found if each.id == of]
        plans = sorted({each.plan for each in there}, key=lambda plan: sum(each.plan == plan for each in there))
        return [each for each in there if each.plan == plans[-1]] if plans else []

    def ranks_on(self, node: str) -> list[int]:
        return [rank for rank, own in enumerate(self.nodes) if own == node]


def list_local_images(directory: MemoryDirectory | None) -> dict[str, Any]:
    """Tell, as JSON, what this rank's node has."""
    if directory is None:
        return {"node": "", "found": []}
    try:
        node = directory.node()
        found = [ImageInfo.of(node, header).as_json() for header in directory.headers()]
    except OSError as error:
        log.warning("what is kept in memory here cannot be read: %s", error)
        return {"node": "", "found": []}
    return {"node": node, "found": found}


def merge_inventories(answers: Sequence[Mapping[str, Any]]) -> ImageInventory:
    """Put together what `list_local_images` has told of all ranks."""
    found = {each: None for answer in answers for each in map(ImageInfo.from_json, answer["found"])}
    return ImageInventory(tuple(answer["node"] for answer in answers), tuple(found))
