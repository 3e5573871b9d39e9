"""Caches that are bounded by the weight of what they keep."""

from __future__ import annotations

import pytest

from elastipod_operator.core.caches import LimitedCache, limited_cache


class Doubled(LimitedCache[[int], int]):
    """Doubles numbers, each as heavy as itself; notes what it worked out."""

    def __init__(self, most: int) -> None:
        self.worked_out: list[int] = []
        super().__init__(self._double, weigh=lambda _, number: number, most=most)

    def _double(self, number: int) -> int:
        self.worked_out.append(number)
        return 2 * number


def test_a_cache_keeps_what_was_used_last_up_to_its_weight() -> None:
    cache = Doubled(10)
    assert [cache(n) for n in (4, 5, 4)] == [8, 10, 8]
    assert cache.worked_out == [4, 5], "what is kept is not worked out again"
    cache(3)
    assert cache.weight == 7, "5 was used least recently"
    assert [cache(n) for n in (4, 3)] == [8, 6]
    assert cache.worked_out == [4, 5, 3]


def test_a_cache_does_not_keep_what_is_too_heavy_by_itself_nor_what_failed() -> None:
    cache = Doubled(10)
    cache(4)
    assert cache(11) == 22
    assert (cache.weight, cache(4), cache.worked_out) == (4, 8, [4, 11])

    def fail(number: int) -> int:
        raise ValueError(number)

    failing = LimitedCache[[int], int](fail, weigh=lambda *_: 1, most=10)
    with pytest.raises(ValueError, match="7"):
        failing(7)
    assert failing.weight == 0


def test_a_function_with_a_cache_is_the_same_function() -> None:
    heard: list[tuple[int, int]] = []

    @limited_cache(10, lambda result, number, more=0: number)
    def add(number: int, more: int = 0) -> int:
        heard.append((number, more))
        return number + more

    assert [add(4, more=1), add(6), add(4, more=1), add(6), add(4, more=2)] == [5, 6, 5, 6, 6]
    assert heard == [(4, 1), (6, 0), (4, 2)]
    assert add.weight == 10, "as heavy as it may be"


def test_a_cleared_cache_works_everything_out_anew() -> None:
    cache = Doubled(10)
    cache(4)
    cache.clear()
    assert cache.weight == 0
    assert [cache(4), cache(4)] == [8, 8]
    assert cache.worked_out == [4, 4]
