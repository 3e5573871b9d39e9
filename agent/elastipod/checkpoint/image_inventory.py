"""Which memory images exist on all nodes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from elastipod.checkpoint.image_header import ImageHeader, image_name
from elastipod.checkpoint.manifest import CheckpointId
from elastipod.checkpoint.memory_directory import MemoryDirectory
from elastipod.json_records import INLINE, json_row

log = logging.getLogger(__name__)


@json_row
@dataclass(frozen=True, slots=True)
class ImageInfo:
    """One image on one node. saved_rank: rank in the run that wrote it; plan: digest of its plan; durable, save: as in its header."""

    node: str
    id: Annotated[CheckpointId, INLINE]
    saved_rank: int
    slot: int
    plan: str
    durable: CheckpointId | None = None
    save: int = 0

    @classmethod
    def of(cls, node: str, header: ImageHeader) -> ImageInfo:
        return cls(node, header.id, header.rank, header.slot, header.plan, header.durable, header.save)

    def is_of(self, header: ImageHeader) -> bool:
        """Return whether a header still describes this image, and not a later one in the same slot."""
        other = (header.id, header.rank, header.slot, header.plan, header.save)
        return (self.id, self.saved_rank, self.slot, self.plan, self.save) == other

    @property
    def name(self) -> str:
        return image_name(self.id.generation, self.saved_rank, self.slot)


@dataclass(frozen=True, slots=True)
class ImageInventory:
    """The images on all nodes, the same on every rank. nodes: by present rank, empty if it has no memory directory."""

    nodes: tuple[str, ...]
    found: tuple[ImageInfo, ...]

    def candidates(self, before: int) -> list[CheckpointId]:
        """List the checkpoints of generations before ``before``, newest first; whether they are complete is not yet known."""
        return sorted({each.id for each in self.found if each.id.generation < before}, reverse=True)

    def durable_checkpoint_of(self, of: CheckpointId) -> CheckpointId | None:
        """Return the newest durable checkpoint at the time of a memory checkpoint; itself if it is durable."""
        return max((each.durable for each in self.found if each.id == of and each.durable), default=None)

    def is_durable(self, of: CheckpointId) -> bool:
        """Return whether a memory checkpoint is in durable storage too: as its own, or written by a run that resumed from it."""
        known = self.durable_checkpoint_of(of)
        return known is not None and known.step == of.step and known.generation >= of.generation

    def written_as(self, of: CheckpointId) -> CheckpointId:
        """Return what a memory checkpoint is called in durable storage, itself if it is not there."""
        known = self.durable_checkpoint_of(of)
        return known if known is not None and self.is_durable(of) else of

    def durable_was_deleted(self, of: CheckpointId, durable: Collection[CheckpointId]) -> bool:
        """Return whether the durable checkpoint that belongs to a memory checkpoint was deleted since: a roll-back by hand.

        A save deletes it only when there is a newer one, and records that one in the images. durable: those that exist now.
        """
        known = self.durable_checkpoint_of(of)
        return known is not None and known not in durable

    def without(self, bad: Collection[ImageInfo]) -> ImageInventory:
        return replace(self, found=tuple(each for each in self.found if each not in bad))

    def images(self, of: CheckpointId) -> list[ImageInfo]:
        """Return the images of the newest save of one checkpoint, all of the same plan: the one that most of them have."""
        of_all_saves = [each for each in self.found if each.id == of]
        newest = max((each.save for each in of_all_saves), default=0)
        there = [each for each in of_all_saves if each.save == newest]
        plans = sorted({each.plan for each in there}, key=lambda plan: sum(each.plan == plan for each in there))
        return [each for each in there if each.plan == plans[-1]] if plans else []

    def ranks_on(self, node: str) -> list[int]:
        return [rank for rank, own in enumerate(self.nodes) if own == node]


@dataclass(frozen=True, slots=True)
class NodeImages:
    """The images on one rank's node, whose identity is empty if it has no memory directory."""

    node: str = ""
    found: tuple[ImageInfo, ...] = ()


def list_local_images(directory: MemoryDirectory | None) -> NodeImages:
    """Return the images on this rank's node."""
    if directory is None:
        return NodeImages()
    try:
        node = directory.node()
        return NodeImages(node, tuple(ImageInfo.of(node, header) for header in directory.headers()))
    except OSError as error:
        log.warning("the memory checkpoints on this node cannot be read: %s", error)
        return NodeImages()


def merge_inventories(answers: Sequence[NodeImages]) -> ImageInventory:
    """Combine the results of `list_local_images` of all ranks."""
    found = dict.fromkeys(each for answer in answers for each in answer.found)
    return ImageInventory(tuple(answer.node for answer in answers), tuple(found))
