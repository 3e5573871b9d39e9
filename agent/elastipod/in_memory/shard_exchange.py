"""Shards travel to ranks that hold them for others, with digests that tell each receiver whether it has what was sent."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from elastipod.errors import ElastipodError
from elastipod.in_memory.contiguous_image import ContiguousImage, room_beside
from elastipod.in_memory.exchange import all_texts
from elastipod.in_memory.members import Members, digest_of
from elastipod.in_memory.parts import PartContent, ShardedShape, part_content, part_of, place_of
from elastipod.in_memory.shard_plan import Need, messages
from elastipod.in_memory.shard_transfer import PartSources, PartTarget, Progress, exchange
from elastipod.in_memory.tensor_digests import DIGEST_LENGTH, digests_of_tensors
from elastipod.rank_ranges import format_ranks

log = logging.getLogger(__name__)

MESSAGE_BYTES = 64 << 20
TRIES = 3  # to hand a part over


class PartsDiffer(ElastipodError):
    """Parts have arrived with other content than they were sent with, each time that they were sent."""


def exchange_images(
    own: ContiguousImage, holders: Mapping[int, int], progress: Progress
) -> tuple[list[PartContent], list[int]]:
    """Give this rank's image to its holder; get those of others that it holds itself, and the ranks whose image has arrived wrong.

    holders: ranks, by rank, the same on all of them. Collective. Raises RuntimeError when a peer is gone.
    """
    rank, num_shards = dist.get_rank(), len(holders)
    rooms = {
        giver: room_beside(own.content, part_of(num_shards, giver))
        for giver, holder in sorted(holders.items())
        if holder == rank
    }
    told: dict[int, torch.Tensor] = {}
    on_way: list[dist.Work | None] = []
    for giver, room in rooms.items():
        pieces = room.pieces(MESSAGE_BYTES)
        told[giver] = torch.empty(len(pieces) * DIGEST_LENGTH, dtype=torch.uint8, device="cpu")
        on_way += [dist.irecv(each, src=giver) for each in (*pieces, told[giver]) if each.numel()]
    sent = own.pieces(MESSAGE_BYTES)
    on_way += [dist.isend(each, dst=holders[rank]) for each in sent]
    digests = _digests(sent)  # while the pieces are on their way
    on_way += [dist.isend(each, dst=holders[rank]) for each in (digests,) if each.numel()]
    for work in on_way:
        assert work is not None, "every rank is in the default group"
        work.wait()
        progress()
    wrong = [
        giver for giver, room in rooms.items() if not torch.equal(_digests(room.pieces(MESSAGE_BYTES)), told[giver])
    ]
    return [room.content for giver, room in rooms.items() if giver not in wrong], wrong


def exchange_parts(
    members: Members, part: int, takers: Mapping[int, int], givers: Mapping[int, int], progress: Progress
) -> list[PartContent]:
    """Give other ranks' parts, as images, to the ranks that take them.

    part: that this rank holds. takers, givers: ranks, by part, the same on all ranks. Gives what this rank takes. Collective.
    Raises RuntimeError when a peer is gone, and PartsDiffer, on every rank.
    """
    if not takers:
        return []
    rank = dist.get_rank()
    own = part_content(members, part)
    taken = {
        each: PartContent(each, own.shapes, {shape.key: _room(shape, each, own) for shape in own.shapes}, own.values)
        for each, taker in takers.items()
        if taker == rank
    }
    missing = dict(takers)
    for _ in range(TRIES):
        _send_parts(own, missing, givers, taken, progress)
        wrong = _wrong_parts(own, missing, givers, taken)
        missing = {each: takers[each] for each in wrong}
        if not missing:
            return list(taken.values())
        if rank == 0:
            log.warning(
                "the shards of %s have arrived on %s with other content than they were sent with",
                format_ranks(sorted({givers[each] for each in wrong})),
                format_ranks(sorted(set(missing.values()))),
            )
    raise PartsDiffer(f"shards have arrived with other content than they were sent with, {TRIES} times")


def any_raised(*flags: bool) -> list[bool]:
    """Give, once every rank has come here, whether some rank has raised each flag. Collective. Raises RuntimeError when a peer is gone."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(flags)
    said = torch.tensor(flags, dtype=torch.uint8, device="cpu")
    dist.all_reduce(said, op=dist.ReduceOp.MAX)
    return [bool(each) for each in said.tolist()]


def _send_parts(
    own: PartContent,
    takers: Mapping[int, int],
    givers: Mapping[int, int],
    taken: Mapping[int, PartContent],
    progress: Progress,
) -> None:
    rank, sharded = dist.get_rank(), _sharded(own)
    targets = {each: PartTarget(each, sharded, image.tensors) for each, image in taken.items() if each in takers}
    concerned = [
        message
        for each, taker in takers.items()
        if rank in (taker, givers[each])
        for message in messages(sharded, Need(taker, each, frozenset()), place_of(each)[0], {each: (givers[each],)})
    ]
    exchange(concerned, targets, PartSources({own.part: own}), progress)
    for target in targets.values():
        target.finish()


def _wrong_parts(
    own: PartContent, takers: Mapping[int, int], givers: Mapping[int, int], taken: Mapping[int, PartContent]
) -> list[int]:
    """Give the parts that arrived with other content, the same on all ranks."""
    rank = dist.get_rank()
    sent = {each: _digest_of_part(own) for each in takers if givers[each] == rank}
    received = {each: _digest_of_part(taken[each]) for each, taker in takers.items() if taker == rank}
    told = [json.loads(text) for text in all_texts(json.dumps([sent, received]))]
    return [each for each, taker in takers.items() if told[givers[each]][0][str(each)] != told[taker][1][str(each)]]


def _digest_of_part(content: PartContent) -> str:
    sharded = _sharded(content)
    outer = [content.tensors[shape.key].movedim(shape.dim or 0, 0) for shape in sharded]
    return digest_of(dict(zip((shape.key for shape in sharded), digests_of_tensors(outer), strict=True)))


def _digests(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give the digests of the pieces as one message; an empty one for none."""
    text = "".join(digests_of_tensors(pieces))
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _sharded(content: PartContent) -> list[ShardedShape]:
    return [shape for shape in content.shapes if shape.dim is not None]


def _room(shape: ShardedShape, part: int, own: PartContent) -> torch.Tensor:
    if shape.dim is None:
        return own.tensors[shape.key].clone()
    return torch.empty(shape.local_sizes(part), dtype=getattr(torch, shape.whole.dtype), device="cpu")
