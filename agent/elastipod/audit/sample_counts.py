"""Counts how often the lineage contains each sample. The order of the lines does not matter."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from elastipod.audit.log_reader import LoggedStep


@dataclass(frozen=True, slots=True)
class SampleCounts:
    """Totals of a counter, in samples; `AuditReport` explains the fields."""

    unique: int
    expected: int
    duplicates: int
    missing: int
    foreign: int


class SampleCounter(Protocol):
    """Takes the lines of the lineage with `add`, then gives totals and the first missing samples."""

    def add(self, lines: Iterable[LoggedStep]) -> None: ...

    def counts(self) -> SampleCounts: ...

    def first_missing(self, limit: int) -> list[list[int]]: ...


class EpochCounter:
    """Expects every index once per epoch. Uses one byte of memory per index of each epoch that has begun and is not complete."""

    def __init__(self, dataset_size: int, epochs: int) -> None:
        self._size, self._epochs = dataset_size, epochs
        self._seen: dict[int, bytearray] = {}  # by epoch, of those that have begun and are not complete
        self._num_seen: Counter[int] = Counter()  # by epoch
        self._expected = dataset_size * epochs
        self._unique = self._duplicates = self._foreign = 0

    def add(self, lines: Iterable[LoggedStep]) -> None:
        for line in lines:
            for first, end in line.spans():
                self._add_range(line.epoch, first, end)

    def counts(self) -> SampleCounts:
        missing = self._expected - self._unique
        return SampleCounts(self._unique, self._expected, self._duplicates, missing, self._foreign)

    def first_missing(self, limit: int) -> list[list[int]]:
        found: list[list[int]] = []
        for epoch in range(self._epochs):
            if len(found) == limit:
                break
            if self._num_seen[epoch] < self._size:
                found += self._missing_in(epoch, limit - len(found))
        return found

    def _missing_in(self, epoch: int, limit: int) -> list[list[int]]:
        seen = self._seen.get(epoch)
        if seen is None:
            return [[epoch, index] for index in range(min(limit, self._size))]
        found: list[list[int]] = []
        index = seen.find(0)
        while index >= 0 and len(found) < limit:
            found.append([epoch, index])
            index = seen.find(0, index + 1)
        return found

    def _add_range(self, epoch: int, first: int, end: int) -> None:
        if not 0 <= epoch < self._epochs:
            self._foreign += end - first
            return
        inside = range(max(first, 0), min(end, self._size))
        self._foreign += (end - first) - len(inside)
        if self._num_seen[epoch] == self._size:
            self._duplicates += len(inside)
            return
        seen = self._seen.get(epoch)
        if seen is None:
            seen = self._seen[epoch] = bytearray(self._size)
        new = 0
        for index in inside:
            new += not seen[index]
            seen[index] = 1
        self._unique += new
        self._duplicates += len(inside) - new
        self._num_seen[epoch] += new
        if self._num_seen[epoch] == self._size:
            del self._seen[epoch]


class MixtureCounter:
    """Expects every source to be drawn as often as its weight says, and its samples equally often, give or take one."""

    def __init__(self, sources: Sequence[tuple[str, int, int]]) -> None:
        """sources: (name, size, draws over all epochs), in the order of their indices."""
        self._draws = [draws for _, _, draws in sources]
        self._seen = [array("L", bytes(array("L").itemsize * size)) for _, size, _ in sources]
        self._starts = (0, *accumulate(len(seen) for seen in self._seen))
        self._foreign = 0

    def add(self, lines: Iterable[LoggedStep]) -> None:
        for line in lines:
            for first, end in line.spans():
                inside = range(max(first, 0), min(end, self._starts[-1]))
                self._foreign += (end - first) - len(inside)
                for index in inside:
                    source = bisect_right(self._starts, index) - 1
                    self._seen[source][index - self._starts[source]] += 1

    def counts(self) -> SampleCounts:
        unique = duplicates = missing = 0
        for seen, draws in zip(self._seen, self._draws, strict=True):
            low, total = draws // len(seen), sum(seen)
            high = low + 1 if draws % len(seen) else low
            too_many = max(sum(count - high for count in seen if count > high), total - draws)
            missing += max(sum(low - count for count in seen if count < low), draws - total)
            duplicates += too_many
            unique += total - too_many
        return SampleCounts(unique, sum(self._draws), duplicates, missing, self._foreign)

    def first_missing(self, limit: int) -> list[list[int]]:
        """Give the first ``limit`` samples that were drawn too rarely, as [passes that they had, index]."""
        found = self._lacking()
        return [each for each, _ in zip(found, range(limit), strict=False)]

    def _lacking(self) -> Iterator[list[int]]:
        for start, seen, draws in zip(self._starts, self._seen, self._draws, strict=False):
            low = draws // len(seen)
            yield from ([count, start + place] for place, count in enumerate(seen) if count < low)
