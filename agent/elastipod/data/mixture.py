"""Several sources mixed by weight, in one canonical order that knows any position at once.

The order consists of *rounds*: with weights 7, 2 and 1, each ten positions hold seven samples of the first source, two of the
second and one of the third, shuffled. Each source is repeated as a whole: all its samples are drawn once before any is drawn
again. The place in a round gives the number of the draw, so nothing has to be counted or stored.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from math import gcd
from typing import Any

from elastipod.data.sources import MapSource, Order, Source, as_int, cached_shuffle
from elastipod.shuffle import splitmix64


class Mixture:
    """Sources by name, with their weights. A sample's index counts through the sources in order, as in torch's ConcatDataset."""

    def __init__(
        self, sources: Mapping[str, int | Source], weights: Mapping[str, int], *, samples: int, seed: int = 0
    ) -> None:
        """sources: sizes of datasets, or sources with an order of their own. weights: whole numbers, one for each source.

        samples: positions in one epoch of the mixture, a multiple of the sum of the (reduced) weights. Raises ValueError, which
        names numbers of samples that work.
        """
        if not sources or set(sources) != set(weights):
            raise ValueError(f"sources are {', '.join(sources)}, but there are weights for {', '.join(weights)}")
        parts = [_weight(name, weights[name]) for name in sources]
        samples, seed = as_int("samples", samples), as_int("seed", seed)
        self._sources = [
            _source(name, source, splitmix64(seed ^ number)) for number, (name, source) in enumerate(sources.items())
        ]
        for name, source in zip(sources, self._sources, strict=True):
            if isinstance(source, Mixture):
                raise ValueError(
                    f"the source {name} is a mixture; give its sources here, with their weights multiplied by that of {name}"
                )
            if len(source) < 1:
                raise ValueError(f"the source {name} has no samples; leave it out")
        divisor = gcd(*parts)
        self._parts = [part // divisor for part in parts]
        self._bounds = (0, *accumulate(self._parts))
        self.round = self._bounds[-1]
        if samples < 1 or samples % self.round:
            below = max(1, samples // self.round) * self.round
            raise ValueError(
                f"samples is {samples}; with these weights it must be whole rounds of {self.round}, such as {below} or "
                f"{below + self.round}"
            )
        self.names = tuple(sources)
        self._starts = (0, *accumulate(len(source) for source in self._sources))
        self._samples, self.seed = samples, seed

    def __len__(self) -> int:
        return self._samples

    @property
    def num_indices(self) -> int:
        """Samples of all sources together; all indices are below it."""
        return self._starts[-1]

    def locate(self, index: int) -> tuple[str, int]:
        """Give (source name, sample in that source) for an index. Raises IndexError."""
        if not 0 <= index < self.num_indices:
            raise IndexError(f"sample {index} is outside of {self.num_indices} samples")
        number = bisect_right(self._starts, index) - 1
        return self.names[number], index - self._starts[number]

    def order(self, epoch: int) -> Order:
        return MixtureOrder(self, epoch)

    def describe(self) -> dict[str, Any]:
        return {
            "kind": "mixture",
            "samples": self._samples,
            "order": list(self.names),
            "seed": self.seed,
            "weights": dict(zip(self.names, self._parts, strict=True)),
            "sources": {name: source.describe() for name, source in zip(self.names, self._sources, strict=True)},
        }

    def draws_by_source(self, epochs: int) -> list[tuple[str, int, int]]:
        """Give (name, size, draws over ``epochs`` epochs) of each source, which `elastipod audit` checks."""
        rounds = self._samples // self.round * epochs
        return [
            (name, len(source), part * rounds)
            for name, source, part in zip(self.names, self._sources, self._parts, strict=True)
        ]

    def index_at(self, round_: int, slot: int) -> int:
        """Give the index of the sample at place ``slot`` of a round; rounds are counted over all epochs."""
        number = bisect_right(self._bounds, slot) - 1
        draw = round_ * self._parts[number] + slot - self._bounds[number]
        source = self._sources[number]
        turn, position = divmod(draw, len(source))
        return self._starts[number] + source.order(turn)[position]


def _source(name: str, source: Any, seed: int) -> Source:
    made: Source = source if hasattr(source, "order") else MapSource(as_int(f"the size of {name}", source), seed)
    return made


def _weight(name: str, weight: Any) -> int:
    if not hasattr(weight, "__index__") or weight < 1:
        raise ValueError(
            f"the weight of {name} is {weight!r}; weights are whole numbers of at least 1, such as 70 and 30"
        )
    return operator.index(weight)


class MixtureOrder:
    """One epoch of a mixture."""

    def __init__(self, mixture: Mixture, epoch: int) -> None:
        self._mixture = mixture
        self._first_round = epoch * (len(mixture) // mixture.round)
        self._seed = splitmix64(mixture.seed)

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < len(self._mixture):
            raise IndexError(f"position {position} is outside an epoch of {len(self._mixture)} samples")
        rounds, place = divmod(position, self._mixture.round)
        round_ = self._first_round + rounds
        return self._mixture.index_at(round_, cached_shuffle(self._mixture.round, self._seed, round_)[place])
