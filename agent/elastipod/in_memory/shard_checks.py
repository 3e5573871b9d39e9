"""Checks of a sharded state: that a change of the layout moved every element, and that replicas of a part are equal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from elastipod.errors import StateDiffersError
from elastipod.in_memory.exchange import MAX_MANIFEST_BYTES, all_texts
from elastipod.in_memory.members import Members, digest_of
from elastipod.in_memory.memory_state import WorldLost, lost_world
from elastipod.in_memory.parts import ShardedShape
from elastipod.in_memory.shard_plan import PartSpan
from elastipod.in_memory.shard_transfer import PartSources, PartTarget
from elastipod.in_memory.state_transfer import MAX_NAMED, Span
from elastipod.rank_ranges import format_ranks
from elastipod.value_words import first_of

_BLOCK = 1 << 20  # elements that are looked at together
_FACTOR, _OFFSET = (
    0x1E3779B97F4A7C15,
    0x632BE59BD9B4E019,
)  # odd, so that every change of an element or of its place shows
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare_layouts(
    shapes: Sequence[ShardedShape],
    sources: PartSources,
    given: Sequence[int],
    target: PartTarget,
    part: int | None,
    progress: Callable[[], None] = lambda: None,
    await_all: Callable[[], None] = lambda: None,
) -> str:
    """Compare each tensor's sum over the former layout with that over the new one; name those that differ. Collective.

    given: the parts of the former layout that this rank answers for. part: its new one, None where another rank answers for it. progress:
    called for every few megabytes, since the sums take seconds for each gigabyte. await_all: called when this rank has its sums.
    """
    sharded = [shape for shape in shapes if shape.dim is not None]
    sums = torch.zeros(2, len(sharded), dtype=torch.int64, device="cpu")
    for at, shape in enumerate(sharded):
        for one in given:
            span = PartSpan(Span(shape.key, *shape.stretch(one)), one)
            sums[0, at] += placed_sum(sources.view(span), span.span.start, shape, progress)
        if part is not None:
            span = PartSpan(Span(shape.key, *shape.stretch(part)), part)
            sums[1, at] += placed_sum(target.view(span), span.span.start, shape, progress)
    await_all()
    if sharded and dist.is_initialized():
        dist.all_reduce(sums)
    differing = [shape.key for at, shape in enumerate(sharded) if sums[0, at] != sums[1, at]]
    return first_of(differing, MAX_NAMED)


def placed_sum(raw: torch.Tensor, start: int, shape: ShardedShape, progress: Callable[[], None] = lambda: None) -> int:
    """Sum the elements of a stretch, each with a weight of its place in the whole tensor, modulo 2**64.

    So sums of stretches add up to that of the whole, however it is divided. start: the stretch's first byte.
    """
    words = raw.view(_WORDS[min(8, getattr(torch, shape.whole.dtype).itemsize)])
    first = start // words.element_size()
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for begin in range(0, words.numel(), _BLOCK):
        block = words[begin : begin + _BLOCK].to(device="cpu", dtype=torch.int64)
        places = torch.arange(first + begin, first + begin + block.numel(), device="cpu")
        total += (block * (places * _FACTOR + _OFFSET)).sum()
        progress()
    return int(total)


def compare_shards(
    members: Members, holders: Sequence[int], reference: int, when: str, progress: Callable[[], None]
) -> None:
    """Compare what all ranks have in common with one rank's, and each part with that of one holder. Collective.

    holders: the rank that the others with a part are compared with, by the part's index. reference: the same for what is common.
    progress: called after each tensor.
    Raises StateDiffersError, which names ranks and tensors, on ranks that differ, and WorldLost on the others.
    """
    digests = members.digests(progress=progress)
    parts = members.sharded_keys()
    own = {key: digest for key, digest in digests.items() if key in parts}
    common = {key: digest for key, digest in digests.items() if key not in parts}
    with lost_world("the digests could not be exchanged"):
        told = [json.loads(text) for text in all_texts(json.dumps([digest_of(common), digest_of(own)]))]
        differing = [
            rank
            for rank, (of_common, of_own) in enumerate(told)
            if of_common != told[reference][0] or of_own != told[holders[rank % len(holders)]][1]
        ]
        if not differing:
            return
        every = [json.loads(text) for text in all_texts(json.dumps([common, own]), MAX_MANIFEST_BYTES)]
    rank = dist.get_rank()
    others = [one for one in differing if one != rank]
    if rank not in differing:
        raise WorldLost(f"{when} the state of {format_ranks(others)} differs from that of its replicas")
    expected: Mapping[str, str] = {**every[reference][0], **every[holders[rank % len(holders)]][1]}
    keys = sorted(key for key in {*digests, *expected} if digests.get(key) != expected.get(key))
    raise StateDiffersError(
        f"{when} the state of {format_ranks([rank])} differs from that of its replicas, in {first_of(keys, MAX_NAMED)}"
    )
