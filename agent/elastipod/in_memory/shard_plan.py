"""Which bytes of a sharded state go from whom to whom when the layout changes. Pure; every rank computes the same messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from elastipod.in_memory.offers import Offer, newest_resume
from elastipod.in_memory.parts import ShardedShape, part_of, parts_of, place_of
from elastipod.in_memory.state_transfer import PIECE_BYTES, Span


@dataclass(frozen=True, slots=True)
class PartSpan:
    """A stretch of one tensor, in bytes of the whole tensor, as a part of the former layout has it."""

    span: Span
    part: int


@dataclass(frozen=True, slots=True)
class Message:
    """What travels at once from one rank to another. number: its place among those that the receiver gets."""

    number: int
    receiver: int
    donor: int
    spans: tuple[PartSpan, ...]

    @property
    def order(self) -> tuple[int, int, int]:
        """All ranks handle messages in this order, so that no two of them wait for each other."""
        return self.number, self.receiver, self.donor

    @property
    def num_bytes(self) -> int:
        return sum(each.span.stop - each.span.start for each in self.spans)


@dataclass(frozen=True, slots=True)
class Need:
    """What one rank is to hold.

    own: the parts of the former layout that it has itself. of_first: keys of tensors, whole on every rank, that it gets from the first
    holder of the first part all the same, because another rank's may differ.
    """

    receiver: int
    part: int
    own: frozenset[int]
    of_first: frozenset[str] = frozenset()

    def has(self, each: PartSpan) -> bool:
        """Whether it takes a stretch from its own memory."""
        return each.part in self.own and each.span.key not in self.of_first


def local_spans(shapes: Sequence[ShardedShape], need: Need, num_shards: int) -> Iterator[PartSpan]:
    """Give the stretches that a rank has itself. num_shards: of the former layout."""
    for shape in shapes:
        for each in _spans(shape, need, num_shards):
            if need.has(each):
                yield each


def messages(
    shapes: Sequence[ShardedShape],
    need: Need,
    num_shards: int,
    donors: Mapping[int, Sequence[int]],
    size: int = PIECE_BYTES,
) -> list[Message]:
    """Give the messages that a rank gets, of at most ``size`` bytes: dealt out to the holders of each part in turn.

    donors: ranks of the new world, by part of the former layout.
    """
    made: list[Message] = []
    waiting: dict[int, list[PartSpan]] = {}
    waiting_bytes: Counter[int] = Counter()
    turn = Counter({part: need.receiver for part in donors})  # receivers begin with different donors

    def send(donor: int) -> None:
        made.append(Message(len(made), need.receiver, donor, tuple(waiting.pop(donor))))
        waiting_bytes[donor] = 0

    for shape in shapes:
        for each in _spans(shape, need, num_shards):
            if need.has(each):
                continue
            for start in range(each.span.start, each.span.stop, size):
                stop = min(start + size, each.span.stop)
                holders = donors[each.part]
                # What is whole may differ between ranks, as buffers do; so all of it is that of one rank.
                donor = holders[0] if shape.dim is None else holders[turn[each.part] % len(holders)]
                turn[each.part] += 1
                if waiting_bytes[donor] + stop - start > size:
                    send(donor)
                waiting.setdefault(donor, []).append(PartSpan(Span(shape.key, start, stop), each.part))
                waiting_bytes[donor] += stop - start
    for donor in sorted(waiting):
        send(donor)
    return made


def concerned_messages(
    shapes: Sequence[ShardedShape],
    needs: Sequence[Need],
    rank: int,
    num_shards: int,
    donors: Mapping[int, Sequence[int]],
    progress: Callable[[], None],
) -> list[Message]:
    """Give the messages that a rank gets or sends. needs: of all ranks. progress: called after each rank's that was looked at.

    What the others send each other is left out before it is worked out, which takes milliseconds for each of them.
    """
    new_shards, _ = place_of(needs[0].part)
    own = [place_of(part)[1] for part, ranks in donors.items() if rank in ranks]
    # Indexes of the new parts that may overlap with what this rank holds.
    near: set[int] = set()
    for rows in {shape.whole.sizes[shape.dim] for shape in shapes if shape.dim is not None and shape.whole.num_bytes}:
        step, new_step = -(-rows // num_shards), -(-rows // new_shards)
        for index in own:
            first_row, end_row = index * step, min((index + 1) * step, rows)
            if first_row < end_row:
                near.update(range(first_row // new_step, (end_row - 1) // new_step + 1))
    gives_whole = donors[part_of(num_shards, 0)][0] == rank and any(shape.dim is None for shape in shapes)
    found: list[Message] = []
    for need in needs:
        takes_whole = gives_whole and bool(not need.own or need.of_first)
        if need.receiver == rank or takes_whole or place_of(need.part)[1] in near:
            made = messages(shapes, need, num_shards, donors)
            found += [message for message in made if rank in (message.receiver, message.donor)]
            progress()
    return found


def _spans(shape: ShardedShape, need: Need, num_shards: int) -> Iterator[PartSpan]:
    """Divide what a rank needs of a tensor by the parts that have it."""
    if shape.dim is None:  # whole everywhere: its own, or that of the first part
        own = () if shape.key in need.of_first else need.own
        if shape.whole.num_bytes:
            yield PartSpan(Span(shape.key, 0, shape.whole.num_bytes), min(own, default=part_of(num_shards, 0)))
        return
    rows = shape.whole.sizes[shape.dim]
    row_bytes = shape.whole.num_bytes // max(1, rows)
    if row_bytes:
        for part, first, last in _overlaps(rows, need.part, num_shards):
            yield PartSpan(Span(shape.key, first * row_bytes, last * row_bytes), part)


@lru_cache(maxsize=1 << 12)  # most tensors have one of a few numbers of rows
def _overlaps(rows: int, part: int, num_shards: int) -> tuple[tuple[int, int, int], ...]:
    """Divide the rows of a part by the parts of another layout that have them: each with its first row, and the first that it has not."""
    new_shards, own_index = place_of(part)
    step, new_step = -(-rows // num_shards), -(-rows // new_shards)
    start, stop = min(own_index * new_step, rows), min((own_index + 1) * new_step, rows)
    if start == stop:
        return ()
    indexes = range(start // step, (stop - 1) // step + 1)
    return tuple(
        (part_of(num_shards, index), max(start, index * step), min(stop, (index + 1) * step)) for index in indexes
    )


def newest_layout(offers: Sequence[Offer], prefer: int) -> int | None:
    """Give the number of shards of the layout whose parts, all held by these ranks, are of the newest step; None if none is whole.

    prefer: where two layouts are of the same step.
    """
    layouts = {
        place_of(part)[0] for offer in offers for part in offer.parts.union(*offer.images.values()) if place_of(part)[0]
    }
    found = {layout: newest_resume(tuple(offers), parts_of(layout)) for layout in layouts}
    whole = {layout: resume.step for layout, resume in found.items() if resume is not None}
    return max(whole, key=lambda layout: (whole[layout], layout == prefer, layout), default=None)


def newest_copied(images: Collection[int], complete: Collection[int]) -> int:
    """Give the step whose images must stay until a newer one is copied: the newest that is copied, or the oldest where none is.

    images: steps of which the rank has images, at least one. complete: those of which it has ended the copies. That a rank commits a
    step says that all ranks have ended the copies of the one before.
    """
    return max((step for step in images if step in complete), default=min(images))


def first_holders(donors: Mapping[int, Sequence[int]], parts: Sequence[int]) -> list[int]:
    """Give the rank that answers for each part of the new layout, by index: one that had that very part before, if there is any.

    donors: ranks of the new world, by part of the former layout. parts: of the new one, by rank; the first ranks have all of them.
    """
    num_shards, _ = place_of(parts[0])
    found = []
    for part in parts[:num_shards]:
        holders = [rank for rank, own in enumerate(parts) if own == part]
        found.append(min([rank for rank in holders if rank in donors.get(part, ())] or holders))
    return found


def receivers_of_parts(leaving: Mapping[int, int], staying: Sequence[int], num_shards: int) -> dict[int, int]:
    """Choose, for each part that leaves with its only holders, the rank that keeps it: the one that will probably need it.

    leaving: the rank that gives it, by part. staying: ranks, in their order, which the new world probably keeps. Gives ranks by part.
    """
    count = len(staying)
    return {part: staying[min(place_of(part)[1] * count // num_shards, count - 1)] for part in sorted(leaving)}


def second_holders(holders: Sequence[tuple[int, int]], staying: Sequence[int]) -> dict[int, int]:
    """Choose a second holder for each part that one rank alone will hold, so that the loss of a rank costs nothing.

    holders: parts with the ranks that hold them when the others have left. staying: as for `receivers_of_parts`. Gives ranks by part;
    empty where one rank stays.
    """
    times = Counter(part for part, _ in holders)
    taken = dict.fromkeys(staying, 0)
    chosen: dict[int, int] = {}
    for part, holder in sorted(holders):
        others = [rank for rank in staying if rank != holder]
        if times[part] == 1 and others:
            chosen[part] = min(others, key=lambda rank: (taken[rank], rank))
            taken[chosen[part]] += 1
    return chosen
