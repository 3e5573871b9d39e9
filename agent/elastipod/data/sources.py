"""Sources of samples, seen as a number of samples and an order for each epoch.

A sample is identified by its index; the code that reads the data knows what the index means. Sharded files are in
`elastipod.data.shards`, weighted mixtures in `elastipod.data.mixture`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from elastipod.shuffle import Shuffle


class Order(Protocol):
    """The samples of one epoch in the order of training: ``order[position]`` is an index.

    An order that looks up many positions faster together also has ``take(positions)``, as `Shuffle` does.
    """

    def __getitem__(self, position: int, /) -> int: ...


def indices_at(order: Order, positions: Sequence[int]) -> Sequence[int]:
    """Give the indices at many positions, with ``take`` if the order has it."""
    take: Callable[[Sequence[int]], list[int]] | None = getattr(order, "take", None)
    return [order[position] for position in positions] if take is None else take(positions)


class Source(Protocol):
    """A fixed set of samples. Its methods are pure functions of the constructor's arguments, the same on every rank."""

    def __len__(self) -> int:
        """Give the number of positions in one epoch."""
        ...

    def order(self, epoch: int) -> Order: ...

    def describe(self) -> dict[str, Any]:
        """Give what the order depends on, as JSON values. Sources with equal descriptions have the same order."""
        ...


def as_int(name: str, value: Any) -> int:
    """Give a whole number of any type, such as numpy's, as an int. Raises TypeError, with ``name``, for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r:.80}; it must be a whole number") from None


cached_shuffle = lru_cache(maxsize=256)(
    Shuffle
)  # every batch needs the one of its epoch, in a mixture one for each source


@dataclass(frozen=True, slots=True)
class MapSource:
    """A dataset that gives any sample by its index: every sample once per epoch, shuffled or not."""

    size: int
    seed: int = 0
    shuffle: bool = True

    def __len__(self) -> int:
        return self.size

    def order(self, epoch: int) -> Order:
        return cached_shuffle(self.size, self.seed, epoch) if self.shuffle else range(self.size)

    def describe(self) -> dict[str, Any]:
        return {"kind": "map", "size": self.size, "seed": self.seed, "shuffle": self.shuffle}
