"""Counts how often the lineage contains each sample. The order of the lines does not matter."""

from __future__ import annotations

from array import array
from bisect import bisect_right
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
    """Expects every index once per epoch. Uses one byte of memory per index and epoch."""

    def __init__(self, dataset_size: int, epochs: int) -> None:
        self._seen = [bytearray(dataset_size) for _ in range(epochs)]
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
        for epoch, seen in enumerate(self._seen):
            index = seen.find(0)
            while index >= 0 and len(found) < limit:
                found.append([epoch, index])
                index = seen.find(0, index + 1)
        return found

    def _add_range(self, epoch: int, first: int, end: int) -> None:
        if not 0 <= epoch < len(self._seen):
            self._foreign += end - first
            return
        seen = self._seen[epoch]
        inside = range(max(first, 0), min(end, len(seen)))
        self._foreign += (end - first) - len(inside)
        for index in inside:
            if seen[index]:
                self._duplicates += 1
            else:
                seen[index] = 1
                self._unique += 1


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
