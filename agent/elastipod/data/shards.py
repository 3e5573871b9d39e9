"""Samples in shards that are read from the front: files of lines, tar archives, streams.

The canonical order deals the shards, in shuffled order, into a fixed number of *lanes* and takes one sample of each lane in
turn. With as many lanes as samples in the global batch a rank reads the same lanes step after step, each from the front;
when the world changes the lanes change hands, and each is opened once at the place where it stood. The order of samples within
a shard is kept, so shards should be written shuffled.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

from elastipod.data.sources import Order, as_int
from elastipod.errors import DataError
from elastipod.shuffle import Shuffle

T = TypeVar("T")
OpenShard = Callable[[int, int], Iterable[T]]
MAX_SKIPPED = 64  # samples that are read and thrown away rather than opening a shard anew


class Shards:
    """The order of samples in shards; a sample's index counts through all shards in their own order.

    Lengths must be known: without them no rank could tell where an epoch ends. `shard_lengths` counts them once.
    """

    def __init__(self, lengths: Sequence[int], *, lanes: int, seed: int = 0, shuffle: bool = True) -> None:
        """lengths: samples of each shard; lanes: shards that are read at once, the global batch is a good number for it.

        Fixed for the job's life. Raises ValueError when there is no sample or no lane.
        """
        lanes, seed = as_int("lanes", lanes), as_int("seed", seed)
        if lanes < 1:
            raise ValueError(f"lanes is {lanes}; it must be at least 1")
        self.lengths = tuple(as_int(f"the length of shard {shard}", length) for shard, length in enumerate(lengths))
        if not sum(self.lengths) or min(self.lengths) < 0:
            raise ValueError("lengths must name at least one sample, and no shard can have fewer than none")
        self._lengths_crc32 = zlib.crc32(json.dumps(self.lengths).encode())
        self._lanes, self._seed, self._shuffle = lanes, seed, shuffle
        self.starts = (0, *accumulate(self.lengths))
        self._latest: tuple[int, _LaneOrder] | None = None

    def __len__(self) -> int:
        return self.starts[-1]

    def order(self, epoch: int) -> Order:
        """Give one epoch's order; it is made once per epoch, in a time that grows with the number of shards."""
        latest = self._latest  # read once: other threads may be in another epoch
        if latest is None or latest[0] != epoch:
            latest = self._latest = (epoch, self._assign_lanes(epoch))
        return latest[1]

    def describe(self) -> dict[str, Any]:
        """Give what the order follows from, as JSON values; of the lengths their CRC-32."""
        return {
            "kind": "shards",
            "shards": len(self.lengths),
            "size": len(self),
            "lengths": self._lengths_crc32,
            "lanes": self._lanes,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }

    def locate(self, index: int) -> tuple[int, int]:
        """Give (shard, sample in the shard) of a sample's index."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside of {len(self)} samples")
        shard = bisect_right(self.starts, index) - 1
        return shard, index - self.starts[shard]

    def _assign_lanes(self, epoch: int) -> _LaneOrder:
        """Give each shard, in the epoch's order, to the lane that is shortest so far."""
        count = len(self.lengths)
        order = Shuffle(count, self._seed, epoch) if self._shuffle else range(count)
        lanes: list[list[int]] = [[] for _ in range(min(self._lanes, count))]
        shortest = [(0, lane) for lane in range(len(lanes))]
        for position in range(count):
            shard = order[position]
            length, lane = shortest[0]
            lanes[lane].append(shard)
            heapreplace(shortest, (length + self.lengths[shard], lane))
        return _LaneOrder([_Lane.of(lane, self.lengths, self.starts) for lane in lanes])


@dataclass(frozen=True, slots=True)
class _Lane:
    """Shards one after another. bounds: samples before each shard, and of all; starts: index of each shard's first."""

    bounds: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, shards: Sequence[int], lengths: Sequence[int], starts: Sequence[int]) -> _Lane:
        bounds = (0, *accumulate(lengths[shard] for shard in shards))
        return cls(bounds, tuple(starts[shard] for shard in shards))

    def __len__(self) -> int:
        return self.bounds[-1]

    def __getitem__(self, place: int) -> int:
        number = bisect_right(self.bounds, place) - 1
        return self.starts[number] + place - self.bounds[number]


class _LaneOrder:
    """One sample of each lane in turn, of those that are not used up; any position costs O(log(lanes + shards))."""

    def __init__(self, lanes: Sequence[_Lane]) -> None:
        self._lanes = sorted(lanes, key=len, reverse=True)  # those that are not used up always come first
        self._rounds = [0]  # at each change of their number: rounds so far,
        self._positions = [0]  # positions so far,
        self._alive: list[int] = []  # and lanes from there on
        for alive in range(len(self._lanes), 0, -1):
            length = len(self._lanes[alive - 1])
            if length > self._rounds[-1]:
                self._alive.append(alive)
                self._positions.append(self._positions[-1] + (length - self._rounds[-1]) * alive)
                self._rounds.append(length)

    def __len__(self) -> int:
        return self._positions[-1]

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} is outside an epoch of {len(self)} samples")
        phase = bisect_right(self._positions, position) - 1
        rounds, lane = divmod(position - self._positions[phase], self._alive[phase])
        return self._lanes[lane][self._rounds[phase] + rounds]


class ShardReader(Generic[T]):
    """A dataset over shards that are read from the front: gives samples by index and keeps the shards that it reads open.

    Fit for a DataLoader, also with worker processes: each opens shards of its own, and reads past the samples that others
    take when they are near. A forked process leaves alone what was open before: its files share their places with the parent's.
    """

    def __init__(self, shards: Shards, open_shard: OpenShard[T], *, max_open: int = 256) -> None:
        """open_shard: (shard, number of the first sample) -> the samples from there on; with worker processes that are
        spawned it must be picklable. max_open: shards open at once; what is needed again is opened again.
        """
        self._shards, self._open_shard, self._max_open = shards, open_shard, max_open
        self._open: OrderedDict[int, _ShardCursor[T]] = OrderedDict()
        self._inherited: list[OrderedDict[int, _ShardCursor[T]]] = []  # of parent processes: neither used nor closed
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: int) -> T:
        """Give a sample. Raises DataError when its shard ends before its length."""
        self._abandon_inherited()
        shard, place = self._shards.locate(index)
        reader = self._open.get(shard)
        if reader is None or not 0 <= place - reader.place <= MAX_SKIPPED:
            reader = self._open_cursor(shard, place)
        self._open.move_to_end(shard)
        while True:
            at = reader.place
            sample = reader.read()
            if sample is None:
                length = self._shards.lengths[shard]
                raise DataError(f"shard {shard} ends before its sample {place}, but it was said to have {length}")
            if at == place:
                return sample[0]

    def __getitems__(self, indices: Sequence[int]) -> list[T]:
        return [self[index] for index in indices]

    def close(self) -> None:
        """Close all shards that this process has open."""
        self._abandon_inherited()
        while self._open:
            self._open.popitem()[1].close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_inherited": []}

    def _abandon_inherited(self) -> None:
        if self._pid != os.getpid():
            self._inherited.append(self._open)
            self._open, self._pid = OrderedDict(), os.getpid()

    def _open_cursor(self, shard: int, place: int) -> _ShardCursor[T]:
        if shard in self._open:
            self._open.pop(shard).close()
        while len(self._open) >= self._max_open:
            self._open.popitem(last=False)[1].close()
        self._open[shard] = _ShardCursor(iter(self._open_shard(shard, place)), place)
        return self._open[shard]


@dataclass(slots=True)
class _ShardCursor(Generic[T]):
    """A shard that is being read. place: number of the sample that comes next."""

    samples: Iterator[T]
    place: int

    def read(self) -> tuple[T] | None:
        """Give the next sample, None at the shard's end."""
        for sample in self.samples:
            self.place += 1
            return (sample,)
        return None

    def close(self) -> None:
        close = getattr(self.samples, "close", None)
        if close is not None:
            close()


def shard_lengths(open_shard: OpenShard[T], num_shards: int, index: str | os.PathLike[str]) -> list[int]:
    """Count the samples of every shard, or give what an earlier count left in the file ``index``.

    Counting reads everything once; let one rank do it before the others start. Raises DataError when the file is no such
    index or one of another number of shards.
    """
    path = Path(index)
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        lengths = [sum(1 for _ in open_shard(shard, 0)) for shard in range(num_shards)]
        _write_index(path, lengths)
        return lengths
    except OSError as error:
        raise DataError(f"cannot read the index of shards {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is no index of shards: {error}") from error
    kept = found.get("lengths") if isinstance(found, dict) else None
    if not isinstance(kept, list) or not all(isinstance(length, int) for length in kept):
        raise DataError(f"{path} is no index of shards: it has no list of lengths")
    if len(kept) != num_shards:
        raise DataError(f"{path} counts {len(kept)} shards, but there are {num_shards}; remove it to count anew")
    return kept


def _write_index(path: Path, lengths: list[int]) -> None:
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")  # pods may share a folder
    try:
        temporary.write_text(json.dumps({"v": 1, "lengths": lengths}))
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise DataError(f"cannot write the index of shards {path}: {error.strerror}") from error
