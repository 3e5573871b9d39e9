"""A cache bounded by the weight of its entries: those of one user may be thousands of times larger than those of another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LimitedCache(Generic[P, R]):
    """Caches the results of a pure function of hashable arguments; evicts the least recently used.

    weigh: gives the weight of a result, from the result and its arguments. most: the limit on all weights together. A result
    that is heavier alone is not cached, and neither is an exception.
    """

    def __init__(self, compute: Callable[P, R], weigh: Callable[..., int], most: int) -> None:
        self._compute, self._weigh, self._most = compute, weigh, most
        self._kept: OrderedDict[Hashable, tuple[R, int]] = OrderedDict()
        self.weight = 0
        """The weight of all entries."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        key = (args, tuple(sorted(kwargs.items()))) if kwargs else args
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
            return found[0]
        result = self._compute(*args, **kwargs)
        self._keep(key, result, self._weigh(result, *args, **kwargs))
        return result

    def clear(self) -> None:
        """Drop all entries."""
        self._kept.clear()
        self.weight = 0

    def _keep(self, key: Hashable, result: R, weight: int) -> None:
        if weight > self._most:
            return
        self._kept[key] = result, weight
        self.weight += weight
        while self.weight > self._most:
            _, (_, gone) = self._kept.popitem(last=False)
            self.weight -= gone


def limited_cache(most: int, weigh: Callable[..., int]) -> Callable[[Callable[P, R]], LimitedCache[P, R]]:
    """Decorate a function with a LimitedCache."""

    def decorate(compute: Callable[P, R]) -> LimitedCache[P, R]:
        return LimitedCache(compute, weigh, most)

    return decorate
