"""Checks over many things that fail when there is nothing to check. `make lint` asks for them (tests/lint/vacuous.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def every(checks: Iterable[object]) -> bool:
    """Whether all checks hold. Fails without any: all() of nothing is true, so it passes when nothing was produced to check."""
    results = list(checks)
    assert results, "there was nothing to check"
    return all(results)


def some(items: Iterable[T]) -> list[T]:
    """Give the items of a loop that asserts something of each. Fails without any, because the loop would assert nothing."""
    found = list(items)
    assert found, "there was nothing to check"
    return found
