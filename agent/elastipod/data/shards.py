"""Samples in shards that are read sequentially: files of lines, tar archives, streams.

The canonical order assigns the shards, in shuffled order, to a fixed number of *lanes* and takes one sample from each lane in
turn. With as many lanes as samples in the global batch, a rank reads the same lanes at every step, each sequentially. When the
world size changes, other ranks continue the lanes, and each lane is opened once at its position. The order within a shard is
kept, so write shards in shuffled order.
"""

from __future__ import annotations

import json
import os
import socket
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
MAX_SKIPPED = 64  # samples that are read and discarded rather than opening the shard again


class Shards:
    """The order of samples in shards; a sample's index counts through all shards in their own order.

    The lengths must be known, since the end of an epoch follows from them. `shard_lengths` counts them once.
    """

    def __init__(self, lengths: Sequence[int], *, lanes: int, seed: int = 0, shuffle: bool = True) -> None:
        """lengths: samples of each shard. lanes: shards that are read at the same time; the global batch size is a good choice.

        All arguments must stay the same for the life of the job. Raises ValueError when there is no sample or no lane.
        """
        lanes, seed = as_int("lanes", lanes), as_int("seed", seed)
        if lanes < 1:
            raise ValueError(f"lanes is {lanes}; it must be at least 1")
        self.lengths = tuple(as_int(f"the length of shard {shard}", length) for shard, length in enumerate(lengths))
        if not sum(self.lengths) or min(self.lengths) < 0:
            raise ValueError("lengths must contain at least one sample, and no shard can have a negative length")
        self._lengths_crc32 = zlib.crc32(json.dumps(self.lengths).encode())
        self._lanes, self._seed, self._shuffle = lanes, seed, shuffle
        self.starts = (0, *accumulate(self.lengths))
        self._latest: tuple[int, _LaneOrder] | None = None

    def __len__(self) -> int:
        return self.starts[-1]

    def order(self, epoch: int) -> Order:
        """Give the order of one epoch. It is computed once per epoch, in time proportional to the number of shards."""
        latest = self._latest  # read once, since other threads may be in another epoch
        if latest is None or latest[0] != epoch:
            latest = self._latest = (epoch, self._assign_lanes(epoch))
        return latest[1]

    def describe(self) -> dict[str, Any]:
        """Give what the order depends on, as JSON values; for the lengths their CRC-32."""
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
        """Give (shard, sample in that shard) for an index. Raises IndexError."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside of {len(self)} samples")
        shard = bisect_right(self.starts, index) - 1
        return shard, index - self.starts[shard]

    def _assign_lanes(self, epoch: int) -> _LaneOrder:
        """Assign each shard, in the order of the epoch, to the lane that is shortest so far."""
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
    """Shards one after another. bounds: samples before each shard, then of all. starts: index of each shard's first sample."""

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
    """One sample from each lane in turn, skipping exhausted lanes. A lookup costs O(log(lanes + shards))."""

    def __init__(self, lanes: Sequence[_Lane]) -> None:
        self._lanes = sorted(lanes, key=len, reverse=True)  # lanes that are not exhausted always come first
        self._rounds = [0]  # whenever a lane ends: rounds so far,
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
    """A dataset over shards that are read sequentially. It gives samples by index and keeps the shards that it reads open.

    Can be used with a DataLoader and worker processes: each process opens shards of its own and reads past samples that others
    take, if they are near. A forked process does not touch inherited files, whose offsets it shares with its parent.
    """

    def __init__(self, shards: Shards, open_shard: OpenShard[T], *, max_open: int = 256) -> None:
        """open_shard: (shard, number of the first sample) -> iterable of the samples from there on; must be picklable for worker
        processes that are spawned. max_open: shards open at the same time, at least 1; the least recently used one is closed.
        Raises ValueError for fewer.
        """
        if max_open < 1:
            raise ValueError(f"max_open is {max_open}; it must be at least 1")
        self._shards, self._open_shard, self._max_open = shards, open_shard, max_open
        self._open: OrderedDict[int, _ShardCursor[T]] = OrderedDict()
        self._inherited: list[
            OrderedDict[int, _ShardCursor[T]]
        ] = []  # of parent processes; neither used nor closed here
        self._pid = os.getpid()

    def __len__(self) -> int:
        return len(self._shards)

    def __getitem__(self, index: int) -> T:
        """Give a sample. Raises DataError when its shard has fewer samples than its length, IndexError outside the data."""
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
    """An open shard. place: number of the next sample in it."""

    samples: Iterator[T]
    place: int

    def read(self) -> tuple[T] | None:
        """Give the next sample as a 1-tuple, None at the end of the shard."""
        for sample in self.samples:
            self.place += 1
            return (sample,)
        return None

    def close(self) -> None:
        close = getattr(self.samples, "close", None)
        if close is not None:
            close()


def shard_lengths(open_shard: OpenShard[T], num_shards: int, index: str | os.PathLike[str]) -> list[int]:
    """Give the number of samples in each shard: from the file ``index`` if it exists, else by counting, which writes the file.

    Counting reads all data once; let one rank do it before the others start. Not a collective. Raises DataError when the file
    cannot be read or written, is not such an index, or has another number of shards.
    """
    path = Path(index)
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return _count_into(path, open_shard, num_shards)
    except OSError as error:
        raise DataError(f"cannot read the index of shards {path}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is not an index of shards: {error}") from error
    kept = found.get("lengths") if isinstance(found, dict) else None
    if not isinstance(kept, list) or not all(isinstance(length, int) for length in kept):
        raise DataError(f"{path} is not an index of shards: it has no list of lengths")
    if len(kept) != num_shards:
        raise DataError(f"{path} counts {len(kept)} shards, but there are {num_shards}; remove it to count again")
    return kept


def _count_into(path: Path, open_shard: OpenShard[T], num_shards: int) -> list[int]:
    """Count the samples and write the index. A folder that cannot be written to is found before the data is read, not after hours."""
    # Several pods may write to the same folder.
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with _written(path):
            temporary.touch()
        lengths = [sum(1 for _ in open_shard(shard, 0)) for shard in range(num_shards)]
        with _written(path):
            temporary.write_text(json.dumps({"v": 1, "lengths": lengths}))
            os.replace(temporary, path)
        return lengths
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def _written(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write the index of shards {path}: {error.strerror}") from error
