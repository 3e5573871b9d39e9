"""Checkpoints in memory: what all nodes have, and which images make a whole that may be resumed from."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.image import ImageHeader, MappedImage, MemoryDirectory, image_name
from elastipod.checkpoint.image_source import ImageSource, OpenImage
from elastipod.checkpoint.save_plan import SavePlan
from elastipod.checkpoint.store import CheckpointId
from elastipod.checkpoint.training_state import RANDOM
from elastipod.collectives import rank_and_world

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


def open_images(
    directory: MemoryDirectory | None, inventory: ImageInventory, of: CheckpointId, comm: Communicator
) -> ImageSource | None:
    """Open the images of one checkpoint to read from; None, when they are no whole. Collective.

    All that there are: a node that keeps copies of another's images reads them itself.
    """
    while images := inventory.images(of):
        own = _LocalImages(directory, inventory, images)
        told = comm.all_reduce(own.open, _common)
        missing = {ImageInfo.from_json(each) for each in told["missing"]}
        good = [each for each in images if each not in missing]
        plan = SavePlan.from_json(told["plan"]) if told["plan"] else None
        if plan is not None and plan.is_covered_by(each.saved_rank for each in good):
            return ImageSource(
                plan, good, inventory, own.opened(plan), told["values"], told["extra"], told["wants_durable"]
            )
        own.close()
        if plan is not None:
            break
        inventory = inventory.without(
            {each for each in images if each.node == images[0].node}
        )  # another one may have the plan
    return None


class _LocalImages:
    """The images of one checkpoint that are on this rank's node."""

    def __init__(
        self, directory: MemoryDirectory | None, inventory: ImageInventory, images: Sequence[ImageInfo]
    ) -> None:
        rank, _ = rank_and_world()
        self._node = inventory.nodes[rank]
        self._directory = directory
        self._is_first = inventory.ranks_on(self._node)[0] == rank
        self._tells_plan = self._is_first and images[0].node == self._node
        self._wanted = [each for each in images if each.node == self._node] if directory is not None else []
        self._open: list[tuple[ImageHeader, MappedImage]] = []

    def open(self) -> dict[str, Any]:
        """Open them, and tell which are not there any more, the values in their headers, and the plan.

        One rank of a node tells the values: everybody's random state, and the other values of the lowest rank.
        """
        if self._directory is None or not self._wanted:
            return {"missing": [], "values": [], "plan": None, "wants_durable": False}
        headers = self._directory.headers()
        missing: list[ImageInfo] = []
        for wanted in self._wanted:
            found = [header for header in headers if wanted.is_of(header)]
            try:
                self._open += [(header, self._directory.open(header)) for header in found]
            except ValueError as error:
                log.warning("passing over a damaged image: %s", error)
                found = []
            if not found:
                missing.append(wanted)
        plan = self._directory.plan(self._wanted[0].plan) if self._tells_plan else None
        return {
            "missing": [each.as_json() for each in missing],
            "values": self._values() if self._is_first else [],
            "plan": plan and plan.to_json(),
            "wants_durable": any(header.wants_durable for header, _ in self._open),
        }

    def opened(self, plan: SavePlan) -> dict[int, OpenImage]:
        return {header.rank: OpenImage.of(header, image, plan) for header, image in self._open}

    def close(self) -> None:
        for _, image in self._open:
            image.close()

    def _values(self) -> list[list[Any]]:
        headers = sorted((header for header, _ in self._open), key=lambda header: header.rank)
        return [
            [
                header.rank,
                {k: v for k, v in header.values.items() if not number or k.startswith(f"{RANDOM}.")},
                {} if number else dict(header.extra),
            ]
            for number, header in enumerate(headers)
        ]


def _common(answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make one of what all ranks have told of their nodes' images."""
    values, extra = _values(answers)
    missing = [each for answer in answers for each in answer["missing"]]
    plan = next((answer["plan"] for answer in answers if answer["plan"]), None)
    wants_durable = any(answer["wants_durable"] for answer in answers)
    return {"missing": missing, "plan": plan, "values": values, "extra": extra, "wants_durable": wants_durable}


def _values(answers: Sequence[Mapping[str, Any]]) -> tuple[dict[str, str], dict[str, Any]]:
    """Give values and extra: the lowest rank's where several tell them."""
    values: dict[str, str] = {}
    told = sorted(
        (told for answer in answers for told in answer["values"]), key=lambda told: int(told[0]), reverse=True
    )
    for _, some, _ in told:
        values |= some
    return values, dict(told[-1][2]) if told else {}
