"""Reading a state from memory images: from this node's by a copy, from other nodes' over the network.

What is read is verified where it has arrived, block by block while it is in the processor's cache, so exactly the bytes that
are used are verified. Only the blocks that are needed are read, and what fits unchanged goes straight into the live tensors.
"""

from __future__ import annotations

import hashlib
import os
import struct
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from elastipod.checkpoint.chunk_read import ChunkRead, chunk_reads, copy_and_verify, verify_stream
from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.dcp_format import chunk_numbers, dcp_metadata
from elastipod.checkpoint.image import CHECKSUM_BLOCK, MappedImage, block_sums, num_checksum_blocks, view_as_chunk
from elastipod.checkpoint.image_header import ImageHeader
from elastipod.checkpoint.load_plan import LoadTarget
from elastipod.checkpoint.save_plan import ChunkIndex, SavePlan, divide_images
from elastipod.checkpoint.transfer_blocks import Buffer
from elastipod.checkpoint.value_codec import decode_value
from elastipod.rank_in_world import RankInWorld

if TYPE_CHECKING:
    from elastipod.checkpoint.image_inventory import ImageInfo, ImageInventory

_COPY_THREADS = 4  # threads of one rank that copy from this node's images; enough for the memory bandwidth

ByteRange = tuple[int, int, int]  # chunk number, first and last byte


@dataclass(frozen=True, slots=True)
class OpenImage:
    """An image on this node, open for reading. positions: of its chunks, by number; sums: of their blocks."""

    image: MappedImage
    positions: Mapping[int, int]
    sums: Mapping[int, Sequence[int]]

    @classmethod
    def of(cls, header: ImageHeader, image: MappedImage, plan: SavePlan) -> OpenImage:
        """Compute the positions. Checksums that a damaged header lacks are taken as 0, and so fail verification."""
        positions, _ = plan.layout(header.rank)
        words = iter(struct.unpack(f">{len(header.sums) // 16}Q", bytes.fromhex(header.sums)))
        sums = {
            number: [next(words, 0) for _ in range(num_checksum_blocks(plan.chunks[number]))] for number in positions
        }
        return cls(image, positions, sums)


@dataclass(slots=True)
class ReadPlan:
    """What one rank copies from its node's images, and what it requests from other ranks.

    local: saved rank, chunk number, target. requests: by donor, reads in the order of their transfer.
    """

    local: list[tuple[int, int, LoadTarget]] = field(default_factory=list)
    requests: dict[int, list[ChunkRead]] = field(default_factory=dict)

    def requested_ranges(self) -> dict[int, list[Any]]:
        """Return the requested ranges, by donor."""
        return {
            donor: [[read.number, read.start, read.end] for read in ranges] for donor, ranges in self.requests.items()
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
        """opened: images on this node, by saved rank; `close` closes them. wants_durable: as in `ImageHeader`."""
        self._plan, self._inventory, self._opened, self._values = plan, inventory, opened, values
        self._rank = RankInWorld.current().rank
        self._node = inventory.nodes[self._rank]
        self._numbers = chunk_numbers(plan)
        self._images = {(each.node, each.saved_rank): each for each in images}
        self.world_size = plan.world_size
        self.metadata = dcp_metadata(plan)
        self.extra = extra
        self.wants_durable = wants_durable

    def names(self) -> list[str]:
        """Return the names of the images, as files of any node."""
        return [each.name for each in self._images.values()]

    def digests(self, except_for: Collection[str]) -> list[list[Any]]:
        """Return, for this node's images, [node, saved rank, group, digest] of the chunks that other ranks staged too.

        A group is the set of chunks that the same ranks staged. except_for: keys of tensors that may differ between replicas.
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

    def disagreeing_images(self, answers: Sequence[Sequence[Sequence[Any]]]) -> set[ImageInfo]:
        """Return the images that differ from the majority of their replicas; all of a group without a majority.

        answers: `digests` by rank.
        """
        votes: dict[int, dict[int, str]] = {}  # by group and saved rank: a copy of an image has no vote of its own
        holders: dict[tuple[int, int], set[str]] = {}
        for node, rank, group, digest in (each for answer in answers for each in answer):
            votes.setdefault(group, {})[rank] = digest
            holders.setdefault((group, rank), set()).add(node)
        return {
            self._images[node, rank]
            for group, by_rank in votes.items()
            for rank in disagreeing_ranks(by_rank)
            for node in holders[group, rank]
        }

    def has_value(self, key: str) -> bool:
        """Return whether a value exists; the random state of a rank is lost with its node."""
        return key in self._values

    def value(self, key: str) -> Any:
        return decode_value(self._values[key])

    def texts(self) -> Mapping[str, str]:
        """Return the plain values, encoded, by key."""
        return self._values

    def plan_of_present_ranks(self) -> SavePlan:
        """Divide what the images hold over the ranks of this world, each of which takes what its node has. The same on every rank."""
        holders: dict[int, list[str]] = {}
        for node, saved_rank in self._images:
            holders.setdefault(saved_rank, []).append(node)
        return divide_images(self._plan, holders, self._inventory.nodes, self._values)

    def checked_chunk(self, number: int) -> torch.Tensor:
        """Return a chunk of an image on this node, as a tensor of its type and sizes. Raises ValueError when a checksum is wrong."""
        saved_rank = self._saved_by(number, self._node)
        assert saved_rank is not None, "no image on this node has it"
        chunk, opened = self._plan.chunks[number], self._opened[saved_rank]
        raw = opened.image.chunk_bytes(chunk, opened.positions[number])
        if block_sums(raw) != opened.sums[number]:
            raise ValueError(f"rank {saved_rank}'s part in memory is damaged")
        return view_as_chunk(raw, chunk)

    def plan_reads(self, wanted: Mapping[ChunkIndex, Sequence[LoadTarget]]) -> ReadPlan:
        """Plan where to read everything from; changes nothing."""
        found = ReadPlan()
        for place, targets in wanted.items():
            number = self._numbers[place]
            saved_rank = self._saved_by(number, self._node)
            if saved_rank is not None:
                found.local += [(saved_rank, number, target) for target in targets]
                continue
            reads = [read for target in targets for read in chunk_reads(number, self._plan.chunks[number], target)]
            if reads:
                found.requests.setdefault(self._donor(number), []).extend(reads)
        return found

    def fill(
        self, read_plan: ReadPlan, requested: Mapping[int, Sequence[ByteRange]], comm: Communicator
    ) -> set[ImageInfo]:
        """Fill live tensors. requested: the ranges that other ranks request from this one, by receiver.

        Returns, the same on every rank, the images in which a checksum was wrong.
        """
        bad: set[tuple[str, int]] = set()
        with self._copying(read_plan, bad) as copying:
            self._transfer(read_plan, requested, bad, comm)

        def all_bad() -> list[tuple[str, int]]:
            for each in copying:
                each.result()
            return sorted(bad)

        bad_images = comm.all_reduce(
            all_bad, lambda of_ranks: sorted({tuple(each) for own in of_ranks for each in own})
        )
        return {self._images[node, saved_rank] for node, saved_rank in bad_images}

    def fill_alone(self, read_plan: ReadPlan) -> set[ImageInfo]:
        """Fill live tensors from this node's images, which hold all that is wanted; return those with a wrong checksum.

        Not collective.
        """
        assert not read_plan.requests, "other nodes hold a part of it"
        bad: set[tuple[str, int]] = set()
        with self._copying(read_plan, bad) as copying:
            for each in copying:
                each.result()
        return {self._images[each] for each in bad}

    def close(self) -> threading.Thread:
        """Unmap the images, which takes a while, in a thread; join it to be sure that the memory is free."""
        thread = threading.Thread(target=self.unmap, name="elastipod-checkpoint-unmap")
        thread.start()
        return thread

    def unmap(self) -> None:
        """Unmap the images."""
        for each in self._opened.values():
            each.image.close()

    @contextmanager
    def _copying(self, read_plan: ReadPlan, bad: set[tuple[str, int]]) -> Iterator[list[Future[None]]]:
        """Copy from this node's images in threads. They end before the images are closed, whatever happens meanwhile."""
        stream = torch.cuda.current_stream() if _uses_cuda() else None
        with ThreadPoolExecutor(self._num_copy_threads(), "elastipod-checkpoint-copy") as executor:
            local = iter(read_plan.local)  # shared: each thread takes the next one
            yield [executor.submit(self._copy_all, local, bad, stream) for _ in range(self._num_copy_threads())]

    def _num_copy_threads(self) -> int:
        """Return this rank's share of the node's processors."""
        return max(1, min(_COPY_THREADS, len(os.sched_getaffinity(0)) // len(self._inventory.ranks_on(self._node))))

    def _copy_all(self, local: Iterable[tuple[int, int, LoadTarget]], bad: set[tuple[str, int]], stream: Any) -> None:
        """Copy targets from images on this node. stream: the caller's CUDA stream, None without CUDA."""
        with torch.cuda.stream(stream):
            for saved_rank, number, target in local:
                chunk, opened = self._plan.chunks[number], self._opened[saved_rank]
                raw = opened.image.chunk_bytes(chunk, opened.positions[number])
                if not copy_and_verify(raw, chunk, target, opened.sums[number]):
                    bad.add((self._node, saved_rank))

    def _transfer(
        self,
        read_plan: ReadPlan,
        requested: Mapping[int, Sequence[ByteRange]],
        bad: set[tuple[str, int]],
        comm: Communicator,
    ) -> None:
        """Send the ranges that others request and receive those that this rank requested, in the order of the requests."""
        out = {receiver: self._bytes_to_send(ranges) for receiver, ranges in requested.items()}
        into = {donor: self._receive_buffers(donor, reads, bad) for donor, reads in read_plan.requests.items()}
        comm.transfer(out, into)

    def _bytes_to_send(self, ranges: Sequence[ByteRange]) -> Iterator[torch.Tensor]:
        """Yield the checksums of all requested blocks, eight bytes each, and then the requested bytes."""
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

    def _receive_buffers(self, donor: int, reads: Sequence[ChunkRead], bad: set[tuple[str, int]]) -> Iterator[Buffer]:
        """Yield a buffer for each thing that another rank sends, in order."""
        node = self._inventory.nodes[donor]
        sums = torch.empty(8 * sum(read.num_checksum_blocks for read in reads), dtype=torch.uint8, device="cpu")
        yield sums, None
        first = 0
        for read in reads:
            last = first + read.num_checksum_blocks
            saved_rank = self._saved_by(read.number, node)
            assert saved_rank is not None

            def wanted(first: int = first, last: int = last) -> list[int]:
                return [each % (1 << 64) for each in sums[8 * first : 8 * last].view(torch.int64).tolist()]

            def at_end(is_right: bool, read: ChunkRead = read, image: tuple[str, int] = (node, saved_rank)) -> None:
                if is_right:
                    read.copy_from_buffer()
                else:
                    bad.add(image)

            yield read.buffer(), verify_stream(read.end - read.start, wanted, at_end)
            first = last

    def _saved_by(self, number: int, node: str) -> int | None:
        """Return the saved rank whose image on a node holds a chunk, None if there is none."""
        return next((rank for rank in self._plan.stagers[number] if (node, rank) in self._images), None)

    def _donor(self, number: int) -> int:
        """Choose the rank that sends a chunk; different receivers choose differently."""
        nodes = sorted({node for node, rank in self._images if rank in self._plan.stagers[number]})
        ranks = [rank for node in nodes for rank in self._inventory.ranks_on(node)]
        return ranks[(self._rank + number) % len(ranks)]


def disagreeing_ranks(votes: Mapping[int, str]) -> set[int]:
    """Return the ranks whose vote differs from that of more than half; all ranks if there is no majority."""
    counts = Counter(votes.values())
    found, count = counts.most_common(1)[0]
    return {rank for rank, vote in votes.items() if 2 * count <= len(votes) or vote != found}


def replicas_agree(answers: Sequence[Sequence[Sequence[Any]]]) -> bool:
    """Return whether all replicas of each group have one digest. answers: `ImageSource.digests` by rank."""
    found = {(group, digest) for answer in answers for _, _, group, digest in answer}
    return len(found) == len({group for group, _ in found})


def _digest(sums: Iterable[Sequence[int]]) -> str:
    found = hashlib.sha256()
    for each in sums:
        found.update(struct.pack(f"<{len(each)}Q", *each))
    return found.hexdigest()[:32]


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
