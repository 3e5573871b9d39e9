"""What a piece of work costs, as a number that is the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Word(str):
    """A word whose comparisons and hashes are calls, so that those of the tuples with it count, which are made in C."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)

    def __hash__(self) -> int:
        return str.__hash__(self)


def calls_in(work: Callable[[], object]) -> int:
    """Count the calls of functions, comparisons of our own objects among them: the same on every machine."""
    number = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return number
