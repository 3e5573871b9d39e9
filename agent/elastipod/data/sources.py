"""Where samples come from, as far as their order is concerned: a source is a number of samples and an order per epoch.

A sample is known by one number, its index; what the number stands for is for whoever reads it. Sharded files are in
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
    """The samples of one epoch in the order of training: `order[position]` is an index.

    One that has a quicker way for many positions offers it as ``take(positions)``, as `Shuffle` does.
    """

    def __getitem__(self, position: int, /) -> int: ...


def indices_at(order: Order, positions: Sequence[int]) -> Sequence[int]:
    """Give the indices at many positions."""
    take: Callable[[Sequence[int]], list[int]] | None = getattr(order, "take", None)
    return [order[position] for position in positions] if take is None else take(positions)


class Source(Protocol):
    """A fixed set of samples. Every method is a pure function of the arguments it was made with, the same on every rank."""

    def __len__(self) -> int:
        """Give the positions of one epoch."""
        ...

    def order(self, epoch: int) -> Order: ...

    def describe(self) -> dict[str, Any]:
        """Say, in JSON values, what the order depends on; two sources that say the same have the same order."""
        ...


def as_int(name: str, value: Any) -> int:
    """Give a whole number of any kind, such as numpy's, as Python's. Raises TypeError with its name for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r:.80}; it must be a whole number") from None


cached_shuffle = lru_cache(maxsize=256)(
    Shuffle
)  # every batch asks for its epoch's, and that of each source in a mixture


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
