"""Which memory images exist on all nodes."""

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
    """One image on one node. saved_rank: rank in the run that wrote it; plan: digest of its plan; durable: as in its header."""

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
        """Return whether a header still describes this image, and not a later one in the same slot."""
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
    """The images on all nodes, the same on every rank. nodes: by present rank, empty if it has no memory directory."""

    nodes: tuple[str, ...]
    found: tuple[ImageInfo, ...]

    def as_json(self) -> dict[str, Any]:
        return {"nodes": self.nodes, "found": [each.as_json() for each in self.found]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ImageInventory:
        return cls(tuple(data["nodes"]), tuple(map(ImageInfo.from_json, data["found"])))

    def candidates(self, before: int) -> list[CheckpointId]:
        """List the checkpoints of generations before ``before``, newest first; whether they are complete is not yet known."""
        return sorted({each.id for each in self.found if each.id.generation < before}, reverse=True)

    def durable_checkpoint_of(self, of: CheckpointId) -> CheckpointId | None:
        """Return the newest durable checkpoint at the time of a memory checkpoint; itself if it is durable."""
        return max((each.durable for each in self.found if each.id == of and each.durable), default=None)

    def durable_was_deleted(self, of: CheckpointId, durable: Collection[CheckpointId]) -> bool:
        """Return whether the durable checkpoint that belongs to a memory checkpoint was deleted since: a roll-back by hand.

        A save deletes it only when there is a newer one, and records that one in the images. durable: those that exist now.
        """
        known = self.durable_checkpoint_of(of)
        return known is not None and known not in durable

    def without(self, bad: Collection[ImageInfo]) -> ImageInventory:
        return replace(self, found=tuple(each for each in self.found if each not in bad))

    def images(self, of: CheckpointId) -> list[ImageInfo]:
        """Return the images of one checkpoint, all of the same plan: the one that most of them have."""
        there = [each for each in self.found if each.id == of]
        plans = sorted({each.plan for each in there}, key=lambda plan: sum(each.plan == plan for each in there))
        return [each for each in there if each.plan == plans[-1]] if plans else []

    def ranks_on(self, node: str) -> list[int]:
        return [rank for rank, own in enumerate(self.nodes) if own == node]


def list_local_images(directory: MemoryDirectory | None) -> dict[str, Any]:
    """Return, as JSON, the images on this rank's node."""
    if directory is None:
        return {"node": "", "found": []}
    try:
        node = directory.node()
        found = [ImageInfo.of(node, header).as_json() for header in directory.headers()]
    except OSError as error:
        log.warning("the memory checkpoints on this node cannot be read: %s", error)
        return {"node": "", "found": []}
    return {"node": node, "found": found}


def merge_inventories(answers: Sequence[Mapping[str, Any]]) -> ImageInventory:
    """Combine the results of `list_local_images` of all ranks."""
    found = {each: None for answer in answers for each in map(ImageInfo.from_json, answer["found"])}
    return ImageInventory(tuple(answer["node"] for answer in answers), tuple(found))
