"""Reading a state from memory images, on whatever nodes they are: from this node's by one copy, from others' by the network.

Every chunk is compared with its sum where it has arrived, block by block while it is in the processor's cache, so that
what is verified is what is used. Chunks that fit as they are go straight into the live tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from elastipod.checkpoints.exchange import Exchange, Piece
from elastipod.checkpoints.files import chunk_numbers, metadata_of
from elastipod.checkpoints.image import MappedImage, MemoryDirectory, shaped, sum_of, written_sum
from elastipod.checkpoints.load import Part
from elastipod.checkpoints.plan import Chunk, Place, Plan
from elastipod.checkpoints.state import RANDOM
from elastipod.checkpoints.values import unpacked
from elastipod.ranks import rank_and_world

if TYPE_CHECKING:
    from elastipod.checkpoints.memory import Found, MemoryView

_STRIDE = 1 << 20  # bytes that are copied and added up at once: they are still in the cache for the second


class Images:
    """The images of one checkpoint. All methods but `value`, `has_value` and `close` are collective."""

    def __init__(
        self,
        directory: MemoryDirectory | None,
        plan: Plan,
        images: Sequence[Found],
        view: MemoryView,
        exchange: Exchange,
        opened: Mapping[int, MappedImage],
    ) -> None:
        """opened: those of this node, by the rank that saved them; they are closed by `close`."""
        self._directory, self._plan, self._view, self._exchange = directory, plan, view, exchange
        self._rank, _ = rank_and_world()
        self._node = view.nodes[self._rank]
        self._numbers = chunk_numbers(plan)
        self._images = {(each.node, each.saved_rank): each for each in images}
        self._opened = opened
        self._positions = {
            saved_rank: plan.layout(saved_rank)[0] for saved_rank in {each.saved_rank for each in images}
        }
        self.world_size = plan.world_size
        self.metadata = metadata_of(plan)
        self._values: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self._sums: dict[tuple[str, int], dict[int, str]] = {}
        self._tell_headers()

    def names(self) -> list[str]:
        """Name the images, as files of any node."""
        return [each.name for each in self._images.values()]

    def vanished(self) -> set[Found]:
        """Give the images that were taken away since they were found."""
        return {found for at, found in self._images.items() if at not in self._sums}

    def has_value(self, key: str) -> bool:
        """Tell whether a value is there; the random state of a rank is not where its node was lost."""
        return key in self._values

    def value(self, key: str) -> Any:
        return unpacked(self._values[key])

    def fill(self, wanted: Mapping[Place, Sequence[Part]]) -> set[Found]:
        """Fill live tensors. Gives, alike on every rank, the images in which something was not as its sum has it."""
        here: list[tuple[int, int, Sequence[Part]]] = []
        remote: dict[int, tuple[int, Sequence[Part]]] = {}
        for place, parts in wanted.items():
            number = self._numbers[place]
            saved_rank = self._saved_by(number, self._node)
            if saved_rank is None:
                remote[number] = self._provider(number), parts
            else:
                here.append((saved_rank, number, parts))
        asked = self._exchange.every_rank(lambda: [[number, giver] for number, (giver, _) in remote.items()])
        bad: set[tuple[str, int]] = set()
        with ThreadPoolExecutor(1, "elastipod-checkpoint-copy") as beside:
            copying = beside.submit(self._copy, here, bad, torch.cuda.current_stream() if _uses_cuda() else None)
            try:
                self._transfer(asked, remote, bad)
            finally:
                copying.exception()  # it ends first, whatever becomes of the transfer: the images are closed then

        def all_bad() -> list[tuple[str, int]]:
            copying.result()
            return sorted(bad)

        told: list[list[tuple[str, int]]] = self._exchange.every_rank(all_bad)
        return {self._images[node, saved_rank] for each in told for node, saved_rank in each}

    def close(self) -> threading.Thread:
        """Let the mapped memory go, which takes a while, in a thread; whoever must know that it is gone joins that."""
        thread = threading.Thread(target=self._unmap, name="elastipod-checkpoint-unmap")
        thread.start()
        return thread

    def _unmap(self) -> None:
        for image in self._opened.values():
            image.close()

    def _copy(self, here: Sequence[tuple[int, int, Sequence[Part]]], bad: set[tuple[str, int]], stream: Any) -> None:
        """Copy from this node's images; stream: of CUDA, that the caller works on, where it uses a device."""
        with torch.cuda.stream(stream):
            for saved_rank, number, parts in here:
                chunk = self._plan.chunks[number]
                raw = self._opened[saved_rank].raw(chunk, self._positions[saved_rank][number])
                if written_sum(_copied(raw, chunk, parts)) != self._sums[self._node, saved_rank][number]:
                    bad.add((self._node, saved_rank))

    def _transfer(
        self,
        asked: Sequence[Sequence[Sequence[int]]],
        remote: Mapping[int, tuple[int, Sequence[Part]]],
        bad: set[tuple[str, int]],
    ) -> None:
        """Send what others ask for and receive what we asked for, between each two ranks in the order of numbers."""
        out: dict[int, Iterator[torch.Tensor]] = {}
        for asker, wishes in enumerate(asked):
            numbers = sorted(number for number, giver in wishes if giver == self._rank)
            if numbers:
                out[asker] = self._given(numbers)
        into = {
            giver: self._rooms(sorted(number for number, wish in remote.items() if wish[0] == giver), remote, bad)
            for giver in {giver for giver, _ in remote.values()}
        }
        self._exchange.transfer(out, into)

    def _given(self, numbers: Sequence[int]) -> Iterator[torch.Tensor]:
        for number in numbers:
            saved_rank = self._saved_by(number, self._node)
            assert saved_rank is not None
            yield self._opened[saved_rank].raw(self._plan.chunks[number], self._positions[saved_rank][number])

    def _rooms(
        self, numbers: Sequence[int], remote: Mapping[int, tuple[int, Sequence[Part]]], bad: set[tuple[str, int]]
    ) -> Iterator[Piece]:
        """Give the room for each chunk, one after the other."""
        for number in numbers:
            giver, parts = remote[number]
            node = self._view.nodes[giver]
            saved_rank = self._saved_by(number, node)
            assert saved_rank is not None
            chunk = self._plan.chunks[number]
            place = _whole_target(chunk, parts)
            room = torch.empty(chunk.num_bytes, dtype=torch.uint8) if place is None else place

            def at_end(
                is_right: bool,
                chunk: Chunk = chunk,
                room: torch.Tensor | None = None if place is not None else room,
                parts: Sequence[Part] = parts,
                image: tuple[str, int] = (node, saved_rank),
            ) -> None:
                if not is_right:
                    bad.add(image)
                elif room is not None:
                    for part in parts:
                        part.fill(shaped(room, chunk))

            yield room, _summing(chunk.num_bytes, self._sums[node, saved_rank][number], at_end)

    def _saved_by(self, number: int, node: str) -> int | None:
        """Give the saved rank whose image on a node holds a chunk; None where none does."""
        return next((rank for rank in self._plan.copiers[number] if (node, rank) in self._images), None)

    def _provider(self, number: int) -> int:
        """Choose who sends us a chunk; different askers choose differently."""
        nodes = sorted({node for node, rank in self._images if rank in self._plan.copiers[number]})
        ranks = [rank for node in nodes for rank in self._view.ranks_on(node)]
        return ranks[(self._rank + number) % len(ranks)]

    def _tell_headers(self) -> None:
        """Have told what headers hold: all sums, everybody's random state, and the other values of the lowest rank."""
        first = min(self._images, key=lambda at: (at[1], at[0]))

        def own() -> list[list[Any]]:
            if self._directory is None or min(self._view.ranks_on(self._node)) != self._rank:
                return []
            names = {each.name: at for at, each in self._images.items() if at[0] == self._node}
            told: list[list[Any]] = []
            for header in self._directory.headers() if names else ():
                if (at := names.get(header.name)) is not None:
                    is_first = at == first
                    values = {k: v for k, v in header.values.items() if is_first or k.startswith(f"{RANDOM}.")}
                    told.append([*at, header.sums, values, dict(header.extra) if is_first else {}])
            return told

        for node, saved_rank, sums, values, extra in (each for told in self._exchange.every_rank(own) for each in told):
            numbers = self._positions[saved_rank]
            self._sums[node, saved_rank] = {
                number: sums[16 * place : 16 * place + 16] for place, number in enumerate(numbers)
            }
            self._values |= values
            self.extra |= extra


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _whole_target(chunk: Chunk, parts: Collection[Part]) -> torch.Tensor | None:
    """Give the bytes of the one live tensor that a chunk is copied into as it is; None where it is not that simple."""
    if len(parts) != 1:
        return None
    (part,) = parts
    return part.memory_of_all(getattr(torch, chunk.dtype), chunk.sizes)


def _copied(raw: torch.Tensor, chunk: Chunk, parts: Collection[Part]) -> int:
    """Copy a chunk to where it belongs; gives the sum of what has arrived there, or of what was copied from."""
    target = _whole_target(chunk, parts)
    if target is None:
        total = sum_of(raw)
        for part in parts:
            part.fill(shaped(raw, chunk))
        return total
    total = 0
    for start in range(0, chunk.num_bytes, _STRIDE):
        block = target[start : start + _STRIDE]
        block.copy_(raw[start : start + _STRIDE])
        total += sum_of(block)
    return total


def _summing(size: int, wanted: str, at_end: Callable[[bool], None]) -> Callable[[torch.Tensor], None]:
    """Add up the blocks of a chunk of ``size`` bytes as they arrive, and tell at the end whether the sum is right."""
    left, total = size, 0

    def arrived(block: torch.Tensor) -> None:
        nonlocal left, total
        left -= block.numel()
        total += sum_of(block)
        if not left:
            at_end(written_sum(total) == wanted)

    return arrived
