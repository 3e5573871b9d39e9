"""Parts of a sharded state that a rank holds for another: those of ranks that leave, and copies in another failure domain."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastipod.checkpoint.collective_planning import DOMAIN_ENV
from elastipod.checkpoint.memory_directory import host_identity
from elastipod.checkpoint.save_plan import choose_copy_holders
from elastipod.in_memory.contiguous_image import ContiguousImage, contiguous_image, room_beside
from elastipod.in_memory.exchange import all_texts
from elastipod.in_memory.members import Members
from elastipod.in_memory.parts import PartContent, ShardedShape, part_content, part_of, place_of
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_plan import Need, messages, second_holders
from elastipod.in_memory.shard_transfer import PartSources, PartTarget, Progress, exchange

log = logging.getLogger(__name__)

GENERATIONS = 2  # of copies that exist at once: the newest complete one, and the one that is being made
MESSAGE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of every rank's shards in another failure domain, so that the loss of one costs no more than the steps since.

    memory_bytes: of host memory that a rank may use for them, its own former state and another's. every: steps between two copies.
    """

    memory_bytes: int
    every: int = 1

    def __post_init__(self) -> None:
        if self.every < 1 or self.memory_bytes < 1:
            raise ValueError(f"{self}: every and memory_bytes must be at least 1; leave copies out for none")


class ShardCopies:
    """Makes the copies of one rank, in one world after the other."""

    def __init__(self, wanted: Copies | None) -> None:
        self._wanted = wanted
        self._holders: dict[int, int] | None = None  # by rank; None: not known in this world yet
        self._complete: set[int] = set()  # steps

    def forget_world(self) -> None:
        """The world has ended; another has other holders."""
        self._holders = None

    def newest(self, rank: RankState) -> int | None:
        """Give the step whose images must stay until a newer one is copied; None: those of the last step are enough.

        That a rank commits a step says that all ranks have ended the copies of the one before.
        """
        if self._wanted is None or self._holders == {} or not rank.images:
            return None
        return max((step for step in rank.images if step in self._complete), default=min(rank.images))

    def is_complete(self, step: int) -> bool:
        """Whether this rank has ended the copies of a step."""
        return step in self._complete

    def take(
        self, step: int, members: Members, part: int, progress: Progress, make_room: Callable[[int], None]
    ) -> list[PartContent]:
        """Give the images that this rank holds of a step; none if no copy is due. Collective. Raises RuntimeError when a peer is gone.

        make_room: is called before the first copy of a world, with how many bytes the images of former worlds may take beside it.
        """
        if self._wanted is None or self._holders == {}:
            return []
        if self._holders is None:
            self._holders = self._choose_holders(members, part)
            if not self._holders:
                return []
            shapes = part_content(members, part).shapes
            make_room(self._wanted.memory_bytes - _num_bytes(shapes, _parts_held(part, self._holders)))
        elif step % self._wanted.every:
            return []
        own = contiguous_image(part_content(members, part, progress))
        taken = _exchange_images(own, self._holders, progress)
        self._complete.add(step)
        return [own.content, *taken]

    def second_holders(
        self,
        holders: Sequence[tuple[int, int]],
        staying: Sequence[int],
        members: Members,
        part: int,
        older_bytes: int,
    ) -> dict[int, int]:
        """Give a second holder for each part that one rank alone will hold when others leave, the same on every rank.

        None without copies, or beyond their budget. holders, staying: as for `shard_plan.second_holders`. part: of this rank.
        older_bytes: of the images that this rank holds of former steps. Collective. Raises RuntimeError when a peer is gone.
        """
        if self._wanted is None:
            return {}
        chosen = second_holders(holders, staying)
        shapes = part_content(members, part).shapes
        held = [*holders, *chosen.items()]
        older = [int(text) for text in all_texts(str(older_bytes))]
        need = max(older[rank] + _num_bytes(shapes, (one for one, at in held if at == rank)) for rank in staying)
        if need > self._wanted.memory_bytes:
            if dist.get_rank() == 0:
                log.warning(
                    "until the new world has made copies, the loss of a rank costs the steps since the newest checkpoint: those who "
                    "stay would hold %d bytes each, and memory_bytes is %d",
                    need,
                    self._wanted.memory_bytes,
                )
            return {}
        return chosen

    def _choose_holders(self, members: Members, part: int) -> dict[int, int]:
        """Give the holder of each rank's copy, the same on every rank; empty, with a sentence, where there will be no copies."""
        assert self._wanted is not None
        num_shards, _ = place_of(part)
        if dist.get_world_size() > num_shards:
            return {}  # other shard groups hold each part
        domain = os.environ.get(DOMAIN_ENV, "")
        told = [json.loads(text) for text in all_texts(json.dumps([f"{host_identity()} {domain}", domain]))]
        holders = choose_copy_holders([str(node) for node, _ in told], [str(domain) for _, domain in told])
        rank = dist.get_rank()
        if not holders:
            return _off("all ranks are on one node", rank)
        shapes = part_content(members, part).shapes
        need = GENERATIONS * _num_bytes(shapes, _parts_held(part, holders))
        needs = [int(text) for text in all_texts(str(need))]
        if max(needs) > self._wanted.memory_bytes:
            where = needs.index(max(needs))
            allowed = self._wanted.memory_bytes
            return _off(f"they would take {max(needs)} bytes on rank {where}, and memory_bytes is {allowed}", rank)
        return holders


def _parts_held(part: int, holders: Mapping[int, int]) -> list[int]:
    """Give the parts that the rank with this one has images of in each generation of copies."""
    num_shards, rank = place_of(part)
    return [part, *(part_of(num_shards, giver) for giver, holder in holders.items() if holder == rank)]


def _exchange_images(own: ContiguousImage, holders: Mapping[int, int], progress: Progress) -> list[PartContent]:
    """Give this rank's image to its holder, and those of others that it holds itself. Collective. Raises RuntimeError as `take`."""
    rank, num_shards = dist.get_rank(), len(holders)
    givers = sorted(giver for giver, holder in holders.items() if holder == rank)
    rooms = [room_beside(own.content, part_of(num_shards, giver)) for giver in givers]
    on_way = [
        dist.irecv(piece, src=giver)
        for giver, room in zip(givers, rooms, strict=True)
        for piece in room.pieces(MESSAGE_BYTES)
    ]
    on_way += [dist.isend(piece, dst=holders[rank]) for piece in own.pieces(MESSAGE_BYTES)]
    for work in on_way:
        assert work is not None, "every rank is in the default group"
        work.wait()
        progress()
    return [room.content for room in rooms]


def exchange_parts(
    members: Members, part: int, takers: Mapping[int, int], givers: Mapping[int, int], progress: Progress
) -> list[PartContent]:
    """Give other ranks' parts, as images, to the ranks that take them. Collective. Raises RuntimeError when a peer is gone.

    part: that this rank holds. takers, givers: ranks, by part. Gives what this rank takes.
    """
    rank = dist.get_rank()
    own = part_content(members, part)
    sharded = [shape for shape in own.shapes if shape.dim is not None]
    taken = [
        PartContent(each, own.shapes, {shape.key: _room(shape, each, own) for shape in own.shapes}, own.values)
        for each, taker in takers.items()
        if taker == rank
    ]
    targets = {image.part: PartTarget(image.part, sharded, image.tensors) for image in taken}
    concerned = [
        message
        for each, taker in takers.items()
        if rank in (taker, givers[each])
        for message in messages(sharded, Need(taker, each, frozenset()), place_of(each)[0], {each: (givers[each],)})
    ]
    exchange(concerned, targets, PartSources({part: own}), progress)
    for target in targets.values():
        target.finish()
    return taken


def agree_on_flag() -> None:
    """Return when every rank has come here. Collective. Raises RuntimeError when a peer is gone."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1, dtype=torch.uint8))


def _room(shape: ShardedShape, part: int, own: PartContent) -> torch.Tensor:
    if shape.dim is None:
        return own.tensors[shape.key].clone()
    return torch.empty(shape.local_sizes(part), dtype=getattr(torch, shape.whole.dtype))


def _num_bytes(shapes: Iterable[ShardedShape], parts: Iterable[int]) -> int:
    return sum(shape.stretch(part)[1] - shape.stretch(part)[0] for part in parts for shape in shapes)


def _off(why: str, rank: int) -> dict[int, int]:
    if rank == 0:
        log.warning("there are no copies of shards in this world: %s", why)
    return {}
