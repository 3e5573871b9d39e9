"""Checkpoints in memory: what all nodes have, and which images make a whole that may be resumed from."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from elastipod.checkpoint_directory import CheckpointId
from elastipod.checkpoints.exchange import Exchange
from elastipod.checkpoints.image import MappedImage, MemoryDirectory, image_name
from elastipod.checkpoints.plan import Plan
from elastipod.checkpoints.reading import Images
from elastipod.ranks import rank_and_world

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """One image that a node has. node: which; saved_rank: of the run that wrote it; plan: its plan's digest.

    durable: as its header has it.
    """

    node: str
    id: CheckpointId
    saved_rank: int
    slot: int
    plan: str
    durable: CheckpointId | None = None

    def as_json(self) -> list[Any]:
        durable = self.durable and [self.durable.step, self.durable.generation]
        return [self.node, self.id.step, self.id.generation, self.saved_rank, self.slot, self.plan, durable]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Found:
        node, step, generation, saved_rank, slot, plan, durable = data
        return cls(
            node, CheckpointId(step, generation), saved_rank, slot, plan, CheckpointId(*durable) if durable else None
        )

    @property
    def name(self) -> str:
        return image_name(self.id.generation, self.saved_rank, self.slot)


@dataclass(frozen=True, slots=True)
class MemoryView:
    """What all nodes have in memory, the same on every rank. nodes: by present rank, empty where it has no memory."""

    nodes: tuple[str, ...]
    found: tuple[Found, ...]

    def candidates(self, before: int) -> list[CheckpointId]:
        """List what older generations than ``before`` have left, freshest first; whether it is whole is not known yet."""
        return sorted({each.id for each in self.found if each.id.generation < before}, reverse=True)

    def durable_at(self, of: CheckpointId) -> CheckpointId | None:
        """Give the newest durable checkpoint that was there when a checkpoint in memory stood, itself if it is one."""
        return max((each.durable for each in self.found if each.id == of and each.durable), default=None)

    def is_rolled_back(self, of: CheckpointId, durable: Collection[CheckpointId]) -> bool:
        """Tell whether the durable checkpoint that one in memory goes with was deleted since, as a roll-back by hand does.

        A save deletes it only when there is a newer one, and notes that one in the images. durable: those there now.
        """
        known = self.durable_at(of)
        return known is not None and known not in durable

    def without(self, bad: Collection[Found]) -> MemoryView:
        return replace(self, found=tuple(each for each in self.found if each not in bad))

    def images(self, of: CheckpointId) -> list[Found]:
        """Give the images of one checkpoint; all of one plan, which is the one that most of them have."""
        there = [each for each in self.found if each.id == of]
        plans = sorted({each.plan for each in there}, key=lambda plan: sum(each.plan == plan for each in there))
        return [each for each in there if each.plan == plans[-1]] if plans else []

    def once_each(self, images: Sequence[Found]) -> list[Found]:
        """Choose one of the nodes that have an image and its copies: where the rank of its number is now, if it is there."""
        chosen: dict[int, Found] = {}
        for each in images:
            is_at_home = each.saved_rank < len(self.nodes) and self.nodes[each.saved_rank] == each.node
            if is_at_home or each.saved_rank not in chosen:
                chosen[each.saved_rank] = each
        return list(chosen.values())

    def ranks_on(self, node: str) -> list[int]:
        return [rank for rank, own in enumerate(self.nodes) if own == node]


def look(directory: MemoryDirectory | None, exchange: Exchange) -> MemoryView:
    """Ask all ranks what their nodes have. Collective."""

    def own() -> dict[str, Any]:
        if directory is None:
            return {"node": "", "found": []}
        try:
            node = directory.node()
            found = [
                Found(node, each.id, each.rank, each.slot, each.plan, each.durable) for each in directory.headers()
            ]
        except OSError as error:
            log.warning("what is kept in memory here cannot be read: %s", error)
            return {"node": "", "found": []}
        return {"node": node, "found": [each.as_json() for each in found]}

    answers = exchange.every_rank(own)
    found = {each: None for answer in answers for each in map(Found.from_json, answer["found"])}
    return MemoryView(tuple(answer["node"] for answer in answers), tuple(found))


def open_images(
    directory: MemoryDirectory | None, view: MemoryView, of: CheckpointId, exchange: Exchange
) -> Images | None:
    """Open the images of one checkpoint to read from; None, when they are no whole. Collective."""
    images = view.images(of)
    first = view.once_each(images)
    source = _opened(directory, view, first, exchange)
    if source is None and len(first) < len(images):
        source = _opened(directory, view, images, exchange)
    return source


def _opened(
    directory: MemoryDirectory | None, view: MemoryView, images: Sequence[Found], exchange: Exchange
) -> Images | None:
    rank, _ = rank_and_world()
    own = [each for each in images if each.node == view.nodes[rank]]
    opened: dict[int, MappedImage] = {}

    def open_own() -> list[list[Any]]:
        headers = {header.name: header for header in directory.headers()} if directory and own else {}
        for each in own:
            try:
                if directory is not None and each.name in headers:
                    opened[each.saved_rank] = directory.open(headers[each.name])
            except ValueError as error:
                log.warning("passing over a damaged image: %s", error)
        return [each.as_json() for each in own if each.saved_rank in opened]

    answers = exchange.every_rank(open_own)
    missing = {
        each
        for rank, node in enumerate(view.nodes)
        for each in images
        if each.node == node and each.as_json() not in answers[rank]
    }
    good = [each for each in images if each not in missing]
    plan = _shared_plan(directory, good, view, exchange)
    if plan is not None and plan.is_covered_by(each.saved_rank for each in good):
        return Images(directory, plan, good, view, exchange, opened)
    for image in opened.values():
        image.close()
    return None


def _shared_plan(
    directory: MemoryDirectory | None, good: Sequence[Found], view: MemoryView, exchange: Exchange
) -> Plan | None:
    """Have one rank that has the plan tell it to all."""
    if not good:
        return None
    rank, _ = rank_and_world()
    teller = min(view.ranks_on(good[0].node))

    def told() -> str | None:
        plan = directory.plan(good[0].plan) if rank == teller and directory else None
        return plan.to_json() if plan else None

    text = exchange.every_rank(told)[teller]
    return Plan.from_json(text) if text else None
