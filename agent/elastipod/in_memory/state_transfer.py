"""Moves the state from the ranks that hold it to those that lack it: striped over all donors, straight into tensors."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastipod.errors import StateDiffersError
from elastipod.in_memory.digests_at_rest import DigestsAtRest
from elastipod.in_memory.exchange import MAX_MANIFEST_BYTES, all_texts, text_of
from elastipod.in_memory.members import (
    Content,
    Members,
    TensorShape,
    digests_by_key,
    empty_like_shape,
    held_members,
)
from elastipod.in_memory.state_manifest import BadManifest, StateManifest, describe, read_manifest
from elastipod.in_memory.tensor_digests import as_bytes

PIECE_BYTES = 4 << 20
ALONE_BYTES = 256 << 10  # from here on, copies that put tensors together cost more than a message of its own
MAX_NAMED = 5
MAX_IN_FLIGHT = 8  # pieces on their way, for each rank
HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Span:
    """A part of one tensor, in bytes."""

    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Piece:
    """What travels in one message: small tensors together, a large one in several pieces."""

    spans: tuple[Span, ...]
    donor: int


def pieces(
    shapes: Sequence[TensorShape], donors: Sequence[int], size: int = PIECE_BYTES, alone: int = ALONE_BYTES
) -> Iterator[Piece]:
    """Divide the state into pieces of at most ``size`` bytes, each from the donor that has to send least so far.

    alone: a stretch of a tensor of at least so many bytes is a piece of its own, which needs no copy; smaller ones travel together.
    Pure; the same on every rank.
    """
    to_send = dict.fromkeys(donors, 0)

    def dealt(spans: Sequence[Span], num_bytes: int) -> Piece:
        donor = min(to_send, key=to_send.__getitem__)
        to_send[donor] += num_bytes
        return Piece(tuple(spans), donor)

    waiting: list[Span] = []
    waiting_bytes = 0
    for shape in shapes:
        whole = shape.num_bytes
        for start in range(0, whole, size):
            span = Span(shape.key, start, min(start + size, whole))
            num_bytes = span.stop - span.start
            if num_bytes >= alone:
                yield dealt([span], num_bytes)
                continue
            if waiting and waiting_bytes + num_bytes > size:
                yield dealt(waiting, waiting_bytes)
                waiting, waiting_bytes = [], 0
            waiting.append(span)
            waiting_bytes += num_bytes
    if waiting:
        yield dealt(waiting, waiting_bytes)


def dealt_out(manifest: StateManifest, lacking: Sequence[TensorShape], donors: Sequence[int]) -> Sequence[Piece]:
    """Divide what a receiver lacks into pieces: what may differ between the donors comes from the first of them."""
    of_all = [each for each in lacking if each.key not in manifest.uncompared]
    of_first = [each for each in lacking if each.key in manifest.uncompared]
    return (*pieces(of_all, donors), *pieces(of_first, donors[:1]))


def sends_of(donor: int, dealt: Mapping[int, Sequence[Piece]]) -> list[tuple[int, Piece]]:
    """Give what a donor sends, with the receivers, in order. dealt: all that each receiver gets, from all donors.

    A piece's place is that among all that its receiver gets, since the receiver takes them in that order. With one order of all
    messages, no circle of ranks waits, also where receivers lack different tensors. Pure.
    """
    own = [
        (place, receiver, piece)
        for receiver, all_ in dealt.items()
        for place, piece in enumerate(all_)
        if piece.donor == donor
    ]
    return [(receiver, piece) for _, receiver, piece in sorted(own, key=lambda each: each[:2])]


def transfer(
    members: Members,
    donors: Sequence[int],
    receivers: Sequence[int],
    progress: Callable[[], None],
    at_rest: DigestsAtRest | None = None,
    *,
    followers: Collection[int] = (),
) -> Content | None:
    """Give receivers the donors' state, as content to load; None on the other ranks. Collective over the default group.

    The tensors of the result are this rank's own where they have the right form, filled in place. at_rest: this rank's digests;
    followers: receivers that have followed a donor, the same on every rank; they get those tensors only whose digests differ from the
    first donor's. Tensors that replicas need not have in common, such as buffers, are all those of the first donor, and are compared
    with it here; for the others `MemoryState.verify` does it. Raises RuntimeError when a peer is gone, BadManifest, StateDiffersError.
    """
    rank = dist.get_rank()
    content = members.content()
    first = donors[0]
    at_rest = at_rest or DigestsAtRest(members, progress)
    # Every donor reads its state while the first one does, for which all wait: the comparison before the first step needs it anyway.
    own_digests = at_rest.digests() if followers and rank in (*donors, *followers) else {}
    text = text_of(first, describe(members, content, own_digests) if rank == first else None)
    manifest = read_manifest(text)
    shapes = manifest.shapes
    own_lack = shapes
    dealt: dict[int, Sequence[Piece]]
    if not followers:
        dealt = dict.fromkeys(receivers, dealt_out(manifest, shapes, donors))
    else:
        own = own_digests if rank in followers else {}
        same = [at for at, each in enumerate(shapes) if _is_held(content, each, own, manifest.digests)]
        told = all_texts(json.dumps(same), MAX_MANIFEST_BYTES)
        lacks = [[each for at, each in enumerate(shapes) if at not in held] for held in map(_numbers, told)]
        dealt = {receiver: dealt_out(manifest, lacks[receiver], donors) for receiver in receivers}
        own_lack = lacks[rank]
    if rank in receivers:
        # What stays is named, because the digest of a parameter in a wrapper may have another name than its tensor has here.
        lacking = {shape.key for shape in own_lack}
        at_rest.forget(but={shape.key for shape in shapes} - lacking)
        room = {shape.key: _room(content, shape, members) for shape in shapes}
        target = Content(room, manifest.values, held_members(content.values, manifest.values, lacking))
        _receive(target, dealt[rank], progress)
        check_received({key: target.tensors[key] for key in manifest.uncompared}, manifest.uncompared, first)
        return target
    if rank in donors:
        # Those that are left out may have other sizes on each rank; the first donor alone sends them.
        left_out = members.uncompared(content.tensors)
        held = [(each.key, each.num_bytes) for each in content.shapes() if each.key not in left_out]
        if held != [(each.key, each.num_bytes) for each in shapes if each.key not in manifest.uncompared]:
            raise BadManifest(f"rank {rank} holds another set of tensors than rank {first}; was the script changed?")
        _send(content, sends_of(rank, dealt), progress)
    return None


def check_received(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, str], donor: int) -> None:
    """Compare tensors with the digests that their donor gave of them. Raises StateDiffersError, which names them."""
    found = digests_by_key(tensors)
    wrong = sorted(key for key, digest in expected.items() if found[key] != digest)
    if wrong:
        raise StateDiffersError(f"rank {donor} sent {', '.join(wrong[:MAX_NAMED])}, and other content has arrived")


def put_back(members: Members, image: Content, progress: Callable[[], None]) -> Content:
    """Give a copy of an image as content to load, in this rank's own memory as `transfer` does."""
    content = members.content()
    tensors: dict[str, torch.Tensor] = {}
    for shape in image.shapes():
        tensors[shape.key] = _room(content, shape, members).copy_(image.tensors[shape.key])
        progress()
    return Content(tensors, image.values)


def _is_held(content: Content, shape: TensorShape, own: Mapping[str, str], expected: Mapping[str, str]) -> bool:
    """Whether a receiver holds a tensor as the donor does. Those without a digest, such as buffers, always travel."""
    tensor = content.tensors.get(shape.key)
    is_alike = tensor is not None and (tensor.dtype, tuple(tensor.shape)) == (getattr(torch, shape.dtype), shape.sizes)
    return is_alike and shape.key in expected and own.get(shape.key) == expected[shape.key]


def _send(content: Content, own: Sequence[tuple[int, Piece]], progress: Callable[[], None]) -> None:
    """Send receivers their pieces, in this order.

    All leave from host memory: optimizers keep counters there, which travel with tensors of an accelerator, and a message that a
    group for accelerators has taken may still fail.
    """
    raws = {key: as_bytes(tensor) for key, tensor in content.tensors.items()}
    sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
    former: tuple[Piece | None, torch.Tensor] = (None, torch.empty(0, device="cpu"))
    for receiver, piece in own:
        if piece != former[0]:  # receivers that lack the same get the same
            views = [raws[span.key][span.start : span.stop].to(HOST) for span in piece.spans]
            former = (piece, views[0] if len(views) == 1 else torch.cat(views))
        data = former[1]
        sent.append((dist.isend(data, dst=receiver), data))
        while len(sent) > MAX_IN_FLIGHT:
            _wait(sent.popleft()[0])
            progress()
    while sent:
        _wait(sent.popleft()[0])
        progress()


def _receive(target: Content, dealt: Sequence[Piece], progress: Callable[[], None]) -> None:
    raws = {key: as_bytes(tensor) for key, tensor in target.tensors.items()}
    on_way: deque[tuple[dist.Work | None, torch.Tensor, Piece]] = deque()

    def is_direct(piece: Piece) -> bool:
        return len(piece.spans) == 1 and raws[piece.spans[0].key].device == HOST

    def take_first() -> None:
        work, data, piece = on_way.popleft()
        _wait(work)
        if not is_direct(piece):
            start = 0
            for span in piece.spans:
                stop = start + span.stop - span.start
                raws[span.key][span.start : span.stop] = data[start:stop]
                start = stop
        progress()

    for piece in dealt:
        if is_direct(piece):
            (span,) = piece.spans
            data = raws[span.key][span.start : span.stop]
        else:
            num_bytes = sum(span.stop - span.start for span in piece.spans)
            data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        on_way.append((dist.irecv(data, src=piece.donor), data, piece))
        if len(on_way) > MAX_IN_FLIGHT:
            take_first()
    while on_way:
        take_first()
    for key, tensor in target.tensors.items():
        raw = raws[key]
        if raw.data_ptr() != tensor.data_ptr():  # its memory was not contiguous
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def _room(content: Content, shape: TensorShape, members: Members) -> torch.Tensor:
    """Give the memory that a tensor is received into: that of the live one where it fits."""
    own = content.tensors.get(shape.key)
    name = str(own.dtype).removeprefix("torch.") if own is not None else ""
    if own is not None and tuple(own.shape) == shape.sizes and name == shape.dtype:
        return own
    is_counter = not shape.sizes  # optimizers keep their step counts on the host
    return empty_like_shape(shape, HOST if is_counter else next(members.model.parameters()).device)


def _numbers(text: str) -> set[int]:
    try:
        return set(map(int, json.loads(text)))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadManifest(f"a receiver does not say what it lacks: {error!r}") from error
