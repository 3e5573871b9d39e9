"""Reading a state from memory images, on whatever nodes they are: from this node's by one copy, from others' by the network.

What is read is compared with its sums where it has arrived, stretch by stretch while it is in the processor's cache, so
that what is verified is what is used. Only the stretches that are needed are read, and what fits as it is goes straight
into the live tensors.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from elastipod.checkpoint.chunk_read import ChunkRead, chunk_reads, copy_and_verify, verify_stream
from elastipod.checkpoint.communicator import Buffer, Communicator
from elastipod.checkpoint.dcp_format import chunk_numbers, dcp_metadata
from elastipod.checkpoint.image import CHECKSUM_BLOCK, MappedImage, num_checksum_blocks
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.save_plan import ChunkIndex, SavePlan
from elastipod.checkpoint.value_codec import decode_value
from elastipod.collectives import rank_and_world

if TYPE_CHECKING:
    from elastipod.checkpoint.image_inventory import ImageInfo, ImageInventory

_COPY_THREADS = 4  # threads of one rank that copy out of this node's images; as many keep a node's memory busy

ByteRange = tuple[int, int, int]  # number of a chunk, and which of its bytes: from, to


@dataclass(frozen=True, slots=True)
class OpenImage:
    """An image of this node, to read from. positions: of its chunks in it, by number; sums: of their stretches."""

    image: MappedImage
    positions: Mapping[int, int]
    sums: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, header: ImageHeader, image: MappedImage, plan: SavePlan) -> OpenImage:
        """Find out what lies where. Sums that a damaged header lacks are taken for 0, which will be found wrong."""
        positions, _ = plan.layout(header.rank)
        words = iter(struct.unpack(f">{len(header.sums) // 16}Q", bytes.fromhex(header.sums)))
        sums = {
            number: [next(words, 0) for _ in range(num_checksum_blocks(plan.chunks[number]))] for number in positions
        }
        return cls(image, positions, sums)


@dataclass(slots=True)
class ReadPlan:
    """What one rank has to copy from its node's images, and to ask other ranks for.

    here: saved rank, number of the chunk, part. asked: by the rank that gives it, pieces in the order in which they travel.
    """

    local: list[tuple[int, int, LoadTarget]] = field(default_factory=list)
    requests: dict[int, list[ChunkRead]] = field(default_factory=dict)

    def as_json(self) -> dict[int, list[Any]]:
        """Give what to ask for, by the rank that is asked."""
        return {
            donor: [[piece.number, piece.start, piece.end] for piece in ranges]
            for donor, ranges in self.requests.items()
        }


class ImageSource:
    """The images of one checkpoint. `fill` is collective."""

    def __init__(
        self,
        plan: SavePlan,
        images: Sequence[ImageInfo],
        inventory: ImageInventory,
        opened: Mapping[int, OpenImage],
        values: Mapping[str, str],
        extra: Mapping[str, Any],
        wants_durable: bool = False,
    ) -> None:
        """opened: those of this node, by the rank that saved them; they are closed by `close`. wants_durable: as in `ImageHeader`."""
        self._plan, self._inventory, self._opened, self._values = plan, inventory, opened, values
        self._rank, _ = rank_and_world()
        self._node = inventory.nodes[self._rank]
        self._numbers = chunk_numbers(plan)
        self._images = {(each.node, each.saved_rank): each for each in images}
        self.world_size = plan.world_size
        self.metadata = dcp_metadata(plan)
        self.extra = extra
        self.wants_durable = wants_durable

    def names(self) -> list[str]:
        """Name the images, as files of any node."""
        return [each.name for each in self._images.values()]

    def digests(self, except_for: Collection[str]) -> list[list[Any]]:
        """Give, for this node's images, [node, saved rank, group, digest of its sums] of what other ranks copied too.

        A group is the chunks that the same ranks copied. except_for: keys of tensors that may differ between replicas.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, stagers in enumerate(self._plan.stagers):
            if len(stagers) > 1 and self._plan.chunks[number].key not in except_for:
                groups.setdefault(stagers, []).append(number)
        return [
            [self._node, rank, group, _digest(opened.sums[number] for number in numbers)]
            for rank, opened in sorted(self._opened.items())
            for group, (stagers, numbers) in enumerate(groups.items())
            if rank in stagers
        ]

    def disagreeing_images(self, told: Sequence[Sequence[Sequence[Any]]]) -> set[ImageInfo]:
        """Give the images that differ from their replicas, all of a group where no majority is alike. told: `digests`, by rank."""
        votes: dict[int, dict[int, str]] = {}  # by group and saved rank: copies of an image are no votes of their own
        holders: dict[tuple[int, int], set[str]] = {}
        for node, rank, group, digest in (each for answer in told for each in answer):
            votes.setdefault(group, {})[rank] = digest
            holders.setdefault((group, rank), set()).add(node)
        return {
            self._images[node, rank]
            for group, by_rank in votes.items()
            for rank in disagreeing_ranks(by_rank)
            for node in holders[group, rank]
        }

    def has_value(self, key: str) -> bool:
        """Tell whether a value is there; the random state of a rank is not where its node was lost."""
        return key in self._values

    def value(self, key: str) -> Any:
        return decode_value(self._values[key])

    def plan_reads(self, wanted: Mapping[ChunkIndex, Sequence[LoadTarget]]) -> ReadPlan:
        """Find out where everything is; changes nothing."""
        found = ReadPlan()
        for place, parts in wanted.items():
            number = self._numbers[place]
            saved_rank = self._saved_by(number, self._node)
            if saved_rank is not None:
                found.local += [(saved_rank, number, part) for part in parts]
                continue
            pieces = [piece for part in parts for piece in chunk_reads(number, self._plan.chunks[number], part)]
            if pieces:
                found.requests.setdefault(self._donor(number), []).extend(pieces)
        return found

    def fill(self, read_plan: ReadPlan, asked: Mapping[int, Sequence[ByteRange]], comm: Communicator) -> set[ImageInfo]:
        """Fill live tensors. asked: what others ask this rank for, by the rank that asks.

        Gives, alike on every rank, the images in which something was not as its sum has it.
        """
        bad: set[tuple[str, int]] = set()
        stream = torch.cuda.current_stream() if _uses_cuda() else None
        with ThreadPoolExecutor(self._num_copy_threads(), "elastipod-checkpoint-copy") as beside:
            # They end before this block does, whatever becomes of the transfer: the images are closed then.
            copying = [beside.submit(self._copy, *each, bad, stream) for each in read_plan.local]
            self._transfer(read_plan, asked, bad, comm)

        def all_bad() -> list[tuple[str, int]]:
            for each in copying:
                each.result()
            return sorted(bad)

        told = comm.all_reduce(all_bad, lambda of_ranks: sorted({tuple(each) for own in of_ranks for each in own}))
        return {self._images[node, saved_rank] for node, saved_rank in told}

    def close(self) -> threading.Thread:
        """Let the mapped memory go, which takes a while, in a thread; whoever must know that it is gone joins that."""
        thread = threading.Thread(target=self._unmap, name="elastipod-checkpoint-unmap")
        thread.start()
        return thread

    def _unmap(self) -> None:
        for each in self._opened.values():
            each.image.close()

    def _num_copy_threads(self) -> int:
        """Share the processors with the other ranks of the node."""
        return max(1, min(_COPY_THREADS, len(os.sched_getaffinity(0)) // len(self._inventory.ranks_on(self._node))))

    def _copy(self, saved_rank: int, number: int, part: LoadTarget, bad: set[tuple[str, int]], stream: Any) -> None:
        """Copy a part from an image of this node; stream: of CUDA, that the caller works on, where it uses a device."""
        with torch.cuda.stream(stream):
            chunk, opened = self._plan.chunks[number], self._opened[saved_rank]
            if not copy_and_verify(
                opened.image.chunk_bytes(chunk, opened.positions[number]), chunk, part, opened.sums[number]
            ):
                bad.add((self._node, saved_rank))

    def _transfer(
        self,
        read_plan: ReadPlan,
        asked: Mapping[int, Sequence[ByteRange]],
        bad: set[tuple[str, int]],
        comm: Communicator,
    ) -> None:
        """Send what others ask for and receive what we asked for, between each two ranks in the order of the asking."""
        out = {receiver: self._bytes_to_send(ranges) for receiver, ranges in asked.items()}
        into = {donor: self._receive_buffers(donor, pieces, bad) for donor, pieces in read_plan.requests.items()}
        comm.transfer(out, into)

    def _bytes_to_send(self, ranges: Sequence[ByteRange]) -> Iterator[torch.Tensor]:
        """Give the sums of all that is asked for, eight bytes each, and then what is asked for."""
        raws: list[torch.Tensor] = []
        sums = bytearray()
        for number, start, end in ranges:
            saved_rank = self._saved_by(number, self._node)
            assert saved_rank is not None
            opened, chunk = self._opened[saved_rank], self._plan.chunks[number]
            raws.append(opened.image.chunk_bytes(chunk, opened.positions[number])[start:end])
            for each in opened.sums[number][start // CHECKSUM_BLOCK : -(-end // CHECKSUM_BLOCK)]:
                sums += each.to_bytes(8, "little")
        yield torch.frombuffer(sums, dtype=torch.uint8)
        yield from raws

    def _receive_buffers(self, donor: int, pieces: Sequence[ChunkRead], bad: set[tuple[str, int]]) -> Iterator[Buffer]:
        """Give the room for each thing that comes from another rank, one after the other."""
        node = self._inventory.nodes[donor]
        sums = torch.empty(8 * sum(piece.num_checksum_blocks for piece in pieces), dtype=torch.uint8)
        yield sums, None
        first = 0
        for piece in pieces:
            last = first + piece.num_checksum_blocks
            saved_rank = self._saved_by(piece.number, node)
            assert saved_rank is not None

            def wanted(first: int = first, last: int = last) -> list[int]:
                return [each % (1 << 64) for each in sums[8 * first : 8 * last].view(torch.int64).tolist()]

            def at_end(
                is_right: bool,
                piece: ChunkRead = piece,
                image: tuple[str, int] = (node, saved_rank),
            ) -> None:
                if is_right:
                    piece.copy_from_buffer()
                else:
                    bad.add(image)

            yield piece.buffer(), verify_stream(piece.end - piece.start, wanted, at_end)
            first = last

    def _saved_by(self, number: int, node: str) -> int | None:
        """Give the saved rank whose image on a node holds a chunk; None where none does."""
        return next((rank for rank in self._plan.stagers[number] if (node, rank) in self._images), None)

    def _donor(self, number: int) -> int:
        """Choose who sends us a chunk; different askers choose differently."""
        nodes = sorted({node for node, rank in self._images if rank in self._plan.stagers[number]})
        ranks = [rank for node in nodes for rank in self._inventory.ranks_on(node)]
        return ranks[(self._rank + number) % len(ranks)]


def disagreeing_ranks(votes: Mapping[int, str]) -> set[int]:
    """Give the ranks whose vote is not that of more than half; all of them where there is no such vote."""
    counts = Counter(votes.values())
    found, count = counts.most_common(1)[0]
    return {rank for rank, vote in votes.items() if 2 * count <= len(votes) or vote != found}


def _digest(sums: Iterable[Sequence[int]]) -> str:
    found = hashlib.sha256()
    for each in sums:
        found.update(struct.pack(f"<{len(each)}Q", *each))
    return found.hexdigest()[:32]


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
