"""Checkpoints in memory: which images make a whole, copies in another node's memory, and reading them on any ranks.

Images travel between ranks as raw bytes over the process group that the manager has for itself, their descriptions as
JSON; what is received has the length that the plan says, or the call fails.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastipod.checkpoint_directory import CheckpointId
from elastipod.checkpoints.files import chunk_numbers, metadata_of
from elastipod.checkpoints.image import Header, MappedImage, MemoryDirectory, image_name
from elastipod.checkpoints.plan import Place, Plan, partners
from elastipod.checkpoints.state import RANDOM
from elastipod.checkpoints.values import unpacked
from elastipod.ranks import from_every_rank, rank_and_world

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """One image that a node has. node: which; saved_rank: of the run that wrote it; plan: its plan's digest."""

    node: str
    id: CheckpointId
    saved_rank: int
    slot: int
    plan: str

    def as_json(self) -> list[Any]:
        return [self.node, self.id.step, self.id.generation, self.saved_rank, self.slot, self.plan]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Found:
        node, step, generation, saved_rank, slot, plan = data
        return cls(node, CheckpointId(step, generation), saved_rank, slot, plan)

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


def look(directory: MemoryDirectory | None, group: dist.ProcessGroup | None) -> MemoryView:
    """Ask all ranks what their nodes have. Collective."""

    def own() -> dict[str, Any]:
        if directory is None:
            return {"node": "", "found": []}
        try:
            node = directory.node()
            found = [Found(node, each.id, each.rank, each.slot, each.plan) for each in directory.headers()]
        except OSError as error:
            log.warning("what is kept in memory here cannot be read: %s", error)
            return {"node": "", "found": []}
        return {"node": node, "found": [each.as_json() for each in found]}

    answers = from_every_rank(own, group)
    found = {each: None for answer in answers for each in map(Found.from_json, answer["found"])}
    return MemoryView(tuple(answer["node"] for answer in answers), tuple(found))


def open_images(
    directory: MemoryDirectory | None, view: MemoryView, of: CheckpointId, group: dist.ProcessGroup | None
) -> ImageSource | None:
    """Verify the images of one checkpoint and give them to read from; None, when they are no whole. Collective."""
    images = view.images(of)
    first = view.once_each(images)
    source = _open_verified(directory, view, first, group)
    if source is None and len(first) < len(images):
        source = _open_verified(directory, view, images, group)
    if source is None and rank_and_world()[0] == 0:
        log.info("the checkpoint of step %d in memory is not whole", of.step)
    return source


def _open_verified(
    directory: MemoryDirectory | None, view: MemoryView, images: Sequence[Found], group: dist.ProcessGroup | None
) -> ImageSource | None:
    rank, _ = rank_and_world()
    mine = [each for each in images if each.node == view.nodes[rank]]
    local_ranks = view.ranks_on(view.nodes[rank])
    share = mine[local_ranks.index(rank) :: len(local_ranks)]
    opened: dict[str, MappedImage] = {}

    def verified() -> list[list[Any]]:
        headers = {header.name: header for header in directory.headers()} if directory and share else {}
        for each in share:
            try:
                if directory is not None and each.name in headers:
                    opened[each.name] = directory.verified(headers[each.name])
            except ValueError as error:
                log.warning("passing over a damaged image: %s", error)
        return [each.as_json() for each in share if each.name in opened]

    good = [Found.from_json(data) for answer in from_every_rank(verified, group) for data in answer]
    plan = _shared_plan(directory, good, view, group)
    if plan is not None and plan.is_covered_by(each.saved_rank for each in good):
        return ImageSource(directory, plan, good, view, group, opened)
    for image in opened.values():
        image.close()
    return None


def _shared_plan(
    directory: MemoryDirectory | None, good: Sequence[Found], view: MemoryView, group: dist.ProcessGroup | None
) -> Plan | None:
    """Have one rank that has the plan tell it to all."""
    if not good:
        return None
    rank, _ = rank_and_world()
    teller = min(view.ranks_on(good[0].node))

    def told() -> str | None:
        plan = directory.plan(good[0].plan) if rank == teller and directory else None
        return plan.to_json() if plan else None

    text = from_every_rank(told, group)[teller]
    return Plan.from_json(text) if text else None


class ImageSource:
    """State in the images of one checkpoint, on whatever nodes they are. All methods but `value` are collective."""

    def __init__(
        self,
        directory: MemoryDirectory | None,
        plan: Plan,
        images: Sequence[Found],
        view: MemoryView,
        group: dist.ProcessGroup | None,
        opened: Mapping[str, MappedImage],
    ) -> None:
        """opened: images of this node that this rank has mapped already; they are closed with the others."""
        self._directory, self._plan, self._view, self._group = directory, plan, view, group
        self._rank, _ = rank_and_world()
        self._numbers = chunk_numbers(plan)
        self._images = {(each.node, each.saved_rank): each for each in images}
        first = min(self._images, key=lambda at: (at[1], at[0]))
        self.world_size = plan.world_size
        values, extra = self._tell_values(first)
        self._values = values
        self.extra: Mapping[str, Any] = extra
        self.metadata = metadata_of(plan)
        self._open = ExitStack()
        self._opened = {name: self._open.enter_context(image) for name, image in opened.items()}
        self._maps: dict[int, tuple[MappedImage, dict[int, int]]] = {}

    def names(self) -> list[str]:
        """Name the images, as files of any node."""
        return [each.name for each in self._images.values()]

    def has_value(self, key: str) -> bool:
        """Tell whether a value is there; the random state of a rank is not where its node was lost."""
        return key in self._values

    def value(self, key: str) -> Any:
        return unpacked(self._values[key])

    def fetch(self, places: Iterable[Place]) -> Iterator[tuple[Place, torch.Tensor]]:
        node = self._view.nodes[self._rank]
        remote: list[tuple[int, int]] = []
        with self._open:
            for place in places:
                number = self._numbers[place]
                here = next((rank for rank in self._plan.copiers[number] if (node, rank) in self._images), None)
                if here is None:
                    remote.append((number, self._provider(number)))
                else:
                    yield place, self._box(here, number)
            yield from self._exchange(remote)

    def _exchange(self, wanted: Sequence[tuple[int, int]]) -> Iterator[tuple[Place, torch.Tensor]]:
        """Send what others ask for and receive what we asked for, in one order that is the same for all."""
        asked = from_every_rank(lambda: list(map(list, wanted)), self._group)
        steps = sorted((number, asker, giver) for asker, wishes in enumerate(asked) for number, giver in wishes)
        room = torch.empty(max((self._plan.chunks[n].num_bytes for n, _ in wanted), default=0), dtype=torch.uint8)
        for number, asker, giver in steps:
            chunk = self._plan.chunks[number]
            if self._rank == giver:
                node = self._view.nodes[giver]
                image = next(rank for rank in self._plan.copiers[number] if (node, rank) in self._images)
                raw = self._box(image, number).reshape(-1).view(torch.uint8)
                dist.send(raw, dst=asker, group=self._group)
            elif self._rank == asker:
                raw = room[: chunk.num_bytes]
                dist.recv(raw, src=giver, group=self._group)
                yield chunk.place, raw.view(getattr(torch, chunk.dtype)).view(chunk.sizes)

    def _provider(self, number: int) -> int:
        """Choose who sends us a chunk; different askers choose differently."""
        nodes = sorted({node for node, rank in self._images if rank in self._plan.copiers[number]})
        ranks = [rank for node in nodes for rank in self._view.ranks_on(node)]
        return ranks[(self._rank + number) % len(ranks)]

    def _box(self, saved_rank: int, number: int) -> torch.Tensor:
        if saved_rank not in self._maps:
            assert self._directory is not None
            found = self._images[self._view.nodes[self._rank], saved_rank]
            positions, size = self._plan.layout(saved_rank)
            image = self._opened.get(found.name)
            if image is None:
                path = self._directory.path / f"{found.name}.bin"
                image = self._open.enter_context(MappedImage.open(path, size))
            self._maps[saved_rank] = image, positions
        image, positions = self._maps[saved_rank]
        return image.box(self._plan.chunks[number], positions[number])

    def _tell_values(self, first: tuple[str, int]) -> tuple[dict[str, str], dict[str, Any]]:
        """Have the plain values told: those of the lowest rank, and everybody's random state."""

        def own() -> dict[str, Any]:
            told: dict[str, str] = {}
            extra: dict[str, Any] = {}
            names = {
                each.name: at
                for at, each in self._images.items()
                if at[0] == self._view.nodes[self._rank] and min(self._view.ranks_on(at[0])) == self._rank
            }
            for header in self._directory.headers() if self._directory and names else ():
                if header.name in names:
                    is_first = names[header.name] == first
                    told |= {k: v for k, v in header.values.items() if is_first or k.startswith(f"{RANDOM}.")}
                    extra = dict(header.extra) if is_first else extra
            return {"values": told, "extra": extra}

        values: dict[str, str] = {}
        extra: dict[str, Any] = {}
        for answer in from_every_rank(own, self._group):
            values |= answer["values"]
            extra |= answer["extra"]
        return values, extra


class Copies:
    """The images that this rank keeps for ranks of other nodes."""

    def __init__(self, directory: MemoryDirectory) -> None:
        self._directory = directory
        self._kept: dict[str, MappedImage] = {}

    def keepers(self, plan: Plan, domains: Sequence[str]) -> dict[int, int]:
        """Give, for each rank whose image a lost node would take along, the rank that keeps a copy."""
        exposed = plan.exposed()
        return {source: keeper for source, keeper in partners(plan.nodes, domains).items() if source in exposed}

    def exchange(
        self,
        plan: Plan,
        keepers: Mapping[int, int],
        image: MappedImage,
        headers: Sequence[str],
        group: dist.ProcessGroup,
    ) -> None:
        """Send this rank's image to its keeper, and keep those of others. Collective.

        headers: of all images that are sent, by rank. A node without room for a copy keeps none, with a warning. Raises
        RuntimeError when a rank is lost.
        """
        rank, _ = rank_and_world()
        sources = [source for source, keeper in keepers.items() if keeper == rank]
        rooms = from_every_rank(lambda: self._make_room(plan, sources, headers), group)
        refused = {source for room in rooms for source in room}
        for source, keeper in sorted(keepers.items()):
            if source in refused:
                continue
            if rank == source:
                dist.send(image.bytes[: image.size], dst=keeper, group=group)
            elif rank == keeper:
                header = Header.from_json(headers[source])
                kept = self._kept[header.name]
                dist.recv(kept.bytes[: kept.size], src=source, group=group)
                try:
                    self._directory.keep_plan(plan)
                    self._directory.publish(header)
                except OSError as error:
                    log.warning("the copy of rank %d's memory is not kept: %s", source, error)

    def _make_room(self, plan: Plan, sources: Sequence[int], headers: Sequence[str]) -> list[int]:
        """Withdraw the copies that are to be written over; gives the sources for which there is no room."""
        refused: list[int] = []
        for source in sources:
            header = Header.from_json(headers[source])
            size = plan.layout(source)[1]
            kept = self._kept.get(header.name)
            try:
                self._directory.withdraw(header.name)
                if kept is not None and kept.size == size:
                    continue
                self._kept[header.name] = MappedImage.create(self._directory.path / f"{header.name}.bin", size)
            except OSError as error:
                log.warning("there is no room here for a copy of rank %d's memory: %s", source, error)
                refused.append(source)
        return refused

    def close(self) -> None:
        for kept in self._kept.values():
            kept.close()
        self._kept.clear()
