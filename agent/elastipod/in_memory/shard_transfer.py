"""Fills a part of a sharded state from the parts of a former layout: from this rank's own memory, then from peers, in bounded messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from elastipod.in_memory.parts import PartContent, ShardedShape
from elastipod.in_memory.shard_plan import Message, PartSpan
from elastipod.in_memory.state_transfer import MAX_IN_FLIGHT

Progress = Callable[[], None]


class PartTarget:
    """The tensors of one part, which are filled by stretches."""

    def __init__(self, part: int, shapes: Sequence[ShardedShape], tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: this rank's own, by key; on any device."""
        self._tensors = tensors
        self._shapes = {shape.key: shape for shape in shapes}
        self._raws = {shape.key: shape.bytes_of(tensors[shape.key]) for shape in shapes}
        self._starts = {shape.key: shape.stretch(part)[0] for shape in shapes}

    def view(self, each: PartSpan) -> torch.Tensor:
        """Give the memory of a stretch."""
        first = self._starts[each.span.key]
        return self._raws[each.span.key][each.span.start - first : each.span.stop - first]

    def finish(self, progress: Progress = lambda: None) -> None:
        """Write what was received into memory in another order back into its tensors. progress: called after each tensor."""
        for key, raw in self._raws.items():
            self._shapes[key].put_bytes(self._tensors[key], raw)
            progress()


class PartSources:
    """The parts that this rank holds, from which it gives stretches."""

    def __init__(self, parts: Mapping[int, PartContent]) -> None:
        self._parts = parts
        self._shapes = {part: {shape.key: shape for shape in shards.shapes} for part, shards in parts.items()}
        self._raws: dict[tuple[int, str], torch.Tensor] = {}

    def view(self, each: PartSpan) -> torch.Tensor:
        """Give the bytes of a stretch, in host memory."""
        place = each.part, each.span.key
        shape = self._shapes[each.part][each.span.key]
        if place not in self._raws:
            self._raws[place] = shape.bytes_of(self._parts[each.part].tensors[each.span.key])
        first = shape.stretch(each.part)[0]
        return self._raws[place][each.span.start - first : each.span.stop - first]


def copy_own(target: PartTarget, sources: PartSources, spans: Sequence[PartSpan], progress: Progress) -> None:
    """Copy what this rank has itself. progress: called after each stretch."""
    for each in spans:
        into, source = target.view(each), sources.view(each)
        if into.data_ptr() != source.data_ptr():
            into.copy_(source)
        progress()


def exchange(
    concerned: Sequence[Message],
    targets: Mapping[int, PartTarget],
    sources: PartSources,
    progress: Progress,
    meet: Callable[[bool], bool] | None = None,
    *,
    meet_after: int = 1,
) -> None:
    """Send and receive the messages that concern this rank, all in the order that all ranks keep to.

    targets: by number of the part that a message's receiver fills; with one target, its messages go there. meet: a collective that all
    ranks, also those without messages, come to when they have handled as many messages of each receiver as ``meet_after`` says, with
    whether they have more; tells whether any has. Raises RuntimeError when a peer is gone.
    """
    rank = dist.get_rank()
    on_way: deque[Callable[[], None]] = deque()
    until = meet_after
    for message in sorted(concerned, key=lambda each: each.order):
        while meet is not None and message.number >= until:
            # Nothing is on its way then, so no rank waits for a message of one that waits for it.
            _finish(on_way, progress)
            meet(True)
            until += meet_after
        on_way.append(_receive(message, targets) if message.receiver == rank else _send(message, sources))
        if len(on_way) > MAX_IN_FLIGHT:
            on_way.popleft()()
            progress()
    _finish(on_way, progress)
    while meet is not None and meet(False):
        pass


def _finish(on_way: deque[Callable[[], None]], progress: Progress) -> None:
    while on_way:
        on_way.popleft()()
        progress()


def _send(message: Message, sources: PartSources) -> Callable[[], None]:
    views = [sources.view(each) for each in message.spans]
    data = views[0] if len(views) == 1 else torch.cat(views)
    work = dist.isend(data, dst=message.receiver)

    def finish(kept: torch.Tensor = data) -> None:
        if work is not None:
            work.wait()

    return finish


def _receive(message: Message, targets: Mapping[int, PartTarget]) -> Callable[[], None]:
    views = [_target_of(each, targets).view(each) for each in message.spans]
    is_direct = len(views) == 1 and views[0].device.type == "cpu"
    data = views[0] if is_direct else torch.empty(message.num_bytes, dtype=torch.uint8, device="cpu")
    work = dist.irecv(data, src=message.donor)

    def finish() -> None:
        if work is not None:
            work.wait()
        start = 0
        for view in [] if is_direct else views:
            view.copy_(data[start : start + view.numel()])
            start += view.numel()

    return finish


def _target_of(each: PartSpan, targets: Mapping[int, PartTarget]) -> PartTarget:
    if len(targets) == 1:
        (only,) = targets.values()
        return only
    return targets[each.part]
