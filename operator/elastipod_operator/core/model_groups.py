"""Whole model groups: the ranks that hold the weights once between them come and go together."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from .wording import counted

Allowed = tuple[int, ...] | range
_NAMED = 6  # sizes that a sentence names


@dataclass(frozen=True, slots=True)
class ModelGroups:
    """How the ranks of a job divide into model groups.

    ranks: of one group (spec.elastipod.parallelism). workers: in each pod; None when the spec does not say.
    """

    ranks: int = 1
    workers: int | None = None

    @property
    def replicas(self) -> int:
        """The number of replicas of which every size is a multiple."""
        return self.ranks // gcd(self.ranks, self.workers or 1)

    def whole(self, sizes: Allowed) -> Allowed:
        """Give the sizes whose ranks form whole groups; possibly none. sizes: ascending."""
        every = self.replicas
        if isinstance(sizes, range):
            # Multiples recur with this period in a grid of sizes.
            period = every // gcd(every, sizes.step)
            first = next((size for size in sizes[:period] if size % every == 0), None)
            return range(0) if first is None else range(first, sizes.stop, sizes.step * period)
        return tuple(size for size in sizes if size % every == 0)

    def why_not(self, size: int) -> str:
        """Say why a size is none, for a sentence."""
        workers = self.workers or 1
        return (
            f"{counted(size, 'replica')} of {counted(workers, 'worker')} {'makes' if size == 1 else 'make'} "
            f"{counted(size * workers, 'rank')}, no multiple of the {self.ranks} of a model group (spec.elastipod.parallelism)"
        )

    def near(self, size: int) -> str:
        """Name sizes around `size` that form whole groups."""
        every = self.replicas
        first = max(1, round(size / every) - _NAMED // 2)
        return ", ".join(str(every * number) for number in range(first, first + _NAMED))


SINGLE_RANKS = ModelGroups()  # every rank holds the whole model
