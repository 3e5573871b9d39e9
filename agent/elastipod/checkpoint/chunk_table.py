"""Compact plans for many ranks: what a hundred thousand chunks have in common is stored, and sent, once.

Tensors that are sharded alike over the ranks share a *sharding*: the boxes (offsets and sizes) of their chunks. A model has as
many shardings as its tensors have shapes, so a plan has some thousand numbers per rank and not an object per chunk.
"""

from __future__ import annotations

import base64
import math
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Annotated, Any, overload

from elastipod.checkpoint.chunk import Chunk, StatePath
from elastipod.json_records import ValueCodec, json_row

MAX_PACKED_BYTES = 1 << 30  # of one array once unpacked; a plan of 16,384 ranks has a tenth of that
_MAX_KEPT = 1 << 15  # chunks of a table, some 8 MB
MAX_EXPANDED_RUNS = 1 << 20  # items that run lengths may stand for: ranks


@json_row
@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What all chunks of a tensor have in common. item_bytes: bytes of one element."""

    key: str
    path: StatePath
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int

    def chunk(self, box: Sequence[int]) -> Chunk:
        """Return the chunk with this box: offsets, then sizes."""
        offsets, sizes = tuple(box[: len(self.shape)]), tuple(box[len(self.shape) :])
        return Chunk(self.key, self.path, self.dtype, self.shape, offsets, sizes, self.item_bytes * math.prod(sizes))

    @classmethod
    def of(cls, chunk: Chunk) -> TensorSpec:
        return cls(chunk.key, chunk.path, chunk.dtype, chunk.shape, chunk.num_bytes // max(1, chunk.num_items))


class ChunkTable(Sequence[Chunk]):
    """The chunks of all tensors in order, created on access. Those of a small table are kept: a load looks at each of them five times."""

    def __init__(
        self, tensors: Sequence[TensorSpec], shardings: Sequence[array[int]], sharding_of: Sequence[int]
    ) -> None:
        """shardings: boxes, concatenated. sharding_of: number of the sharding, by tensor."""
        self.tensors, self.shardings, self.sharding_of = tensors, shardings, sharding_of
        counts = [
            len(shardings[number]) // (2 * len(tensor.shape)) if tensor.shape else 1
            for tensor, number in zip(tensors, sharding_of, strict=True)
        ]
        self.starts = [0, *accumulate(counts)]
        self._kept: list[Chunk | None] = [None] * self.starts[-1] if self.starts[-1] <= _MAX_KEPT else []

    def byte_sizes(self) -> Iterator[int]:
        """Yield the bytes of every chunk without creating it."""
        items: dict[int, list[int]] = {}  # numbers in each box, by sharding
        for index, tensor in enumerate(self.tensors):
            sharding = self.sharding_of[index]
            if sharding not in items:
                numbers = range(self.starts[index], self.starts[index + 1])
                items[sharding] = [self._chunk(index, number).num_items for number in numbers]
            yield from (tensor.item_bytes * each for each in items[sharding])

    def __len__(self) -> int:
        return self.starts[-1]

    @overload
    def __getitem__(self, number: int) -> Chunk: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Chunk]: ...

    def __getitem__(self, number: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._chunk(bisect_right(self.starts, number) - 1, number)

    def __iter__(self) -> Iterator[Chunk]:
        for index in range(len(self.tensors)):
            for number in range(self.starts[index], self.starts[index + 1]):
                yield self._chunk(index, number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkTable) and list(self) == list(other)

    def _chunk(self, index: int, number: int) -> Chunk:
        """Return a chunk of the tensor with this index."""
        kept = self._kept[number] if self._kept else None
        if kept is not None:
            return kept
        tensor = self.tensors[index]
        width = 2 * len(tensor.shape)
        first = (number - self.starts[index]) * width
        made = tensor.chunk(self.shardings[self.sharding_of[index]][first : first + width])
        if self._kept:
            self._kept[number] = made
        return made


@dataclass(frozen=True, slots=True)
class RankSets(Sequence[tuple[int, ...]]):
    """A sequence of sets of ranks, many of them equal. sets: the distinct ones; set_of: the number of the set, by place."""

    sets: tuple[tuple[int, ...], ...]
    set_of: array[int]

    def __len__(self) -> int:
        return len(self.set_of)

    @overload
    def __getitem__(self, place: int) -> tuple[int, ...]: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[tuple[int, ...]]: ...

    def __getitem__(self, place: int | slice) -> tuple[int, ...] | Sequence[tuple[int, ...]]:
        if isinstance(place, slice):
            return [self.sets[kind] for kind in self.set_of[place]]
        return self.sets[self.set_of[place]]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (self.sets[kind] for kind in self.set_of)

    def with_rank(self, rank: int) -> list[int]:
        """Return the places of the sets that contain a rank."""
        sets = {kind for kind, ranks in enumerate(self.sets) if rank in ranks}
        return [place for place, kind in enumerate(self.set_of) if kind in sets]


class RankSetsBuilder:
    """Builds `RankSets` place by place."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, ...], int] = {}
        self._kind_of = array("i")

    def add(self, ranks: tuple[int, ...]) -> None:
        self._kind_of.append(self._kinds.setdefault(ranks, len(self._kinds)))

    def build(self) -> RankSets:
        return RankSets(tuple(self._kinds), self._kind_of)


def pack_ints(numbers: array[int]) -> str:
    """Return numbers as compressed text for JSON."""
    ordered = numbers[:]
    if sys.byteorder == "big":
        ordered.byteswap()
    return base64.b64encode(zlib.compress(ordered.tobytes())).decode()


def unpack_ints(kind: str, text: str) -> array[int]:
    """Return the numbers that `pack_ints` packed; kind: the array's type code. Raises ValueError for any other text."""
    numbers: array[int] = array(kind)
    unpacking = zlib.decompressobj()
    try:
        content = unpacking.decompress(base64.b64decode(text, validate=True), MAX_PACKED_BYTES)
    except zlib.error as error:
        raise ValueError(f"no packed numbers: {error}") from error
    if not unpacking.eof:
        raise ValueError(f"no packed numbers: they are torn, or more than {MAX_PACKED_BYTES} bytes")
    numbers.frombytes(content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def run_lengths(values: Iterable[str]) -> list[tuple[str, int]]:
    """Return each run of equal neighbours as (value, count)."""
    return [(value, len(list(same))) for value, same in groupby(values)]


def expand_runs(pairs: Iterable[Sequence[Any]]) -> tuple[str, ...]:
    """Return the values of which `run_lengths` gave the runs. Raises ValueError or TypeError for anything else."""
    runs = [(str(value), int(count)) for value, count in pairs]
    if sum(count for _, count in runs) > MAX_EXPANDED_RUNS:
        raise ValueError(f"they stand for more than {MAX_EXPANDED_RUNS} values")
    return tuple(value for value, count in runs for _ in range(count))


@dataclass(frozen=True, slots=True)
class _Packed(ValueCodec["array[int]"]):
    kind: str

    def encode(self, value: array[int]) -> str:
        return pack_ints(value)

    def decode(self, data: Any) -> array[int]:
        return unpack_ints(self.kind, data)


@dataclass(frozen=True, slots=True)
class _RunLengths(ValueCodec["tuple[str, ...]"]):
    def encode(self, value: tuple[str, ...]) -> list[tuple[str, int]]:
        return run_lengths(value)

    def decode(self, data: Any) -> tuple[str, ...]:
        return expand_runs(data)


if TYPE_CHECKING:
    PackedInt64 = array[int]
    PackedInt32 = array[int]
else:  # array is no generic type before Python 3.12
    PackedInt64 = Annotated[array, _Packed("q")]
    PackedInt32 = Annotated[array, _Packed("i")]
StringRuns = Annotated[tuple[str, ...], _RunLengths()]
