"""Which regular expressions compile quickly. They come from users' jobs, and the operator compiles them between other work."""

from __future__ import annotations

import importlib
import sys
from typing import Any

# Python's own parser of patterns: it takes little time for any pattern, which compiling does not.
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
MAX_SETS, MAX_WIDE_SETS = 64, 2  # some 20 ms each to compile
_LATIN_1 = 0xFF


def check_compile_time(pattern: str) -> None:
    """Raise ValueError for a pattern that takes long to compile: Python looks at each character of a set beyond U+00FF. Raises re.error."""
    sets, wide = _count_sets(pattern)
    if sets > MAX_SETS or wide > MAX_WIDE_SETS:
        raise ValueError(
            f"it has {sets} sets with ranges of characters, and {wide} of these reach beyond U+00FF; at most {MAX_SETS} and "
            f"{MAX_WIDE_SETS} are allowed, because more take long to compile"
        )


def _count_sets(pattern: str) -> tuple[int, int]:
    """Give how many sets with ranges of characters a pattern has, and how many of these reach beyond U+00FF. Raises re.error."""
    sets = wide = 0
    pending: list[Any] = [_parser.parse(pattern)]
    while pending:
        item = pending.pop()
        if isinstance(item, tuple) and len(item) == 2 and str(item[0]) == "IN":
            ends = [of[1] for what, of in item[1] if str(what) == "RANGE"]
            sets += bool(ends)
            wide += max(ends, default=0) > _LATIN_1
        elif isinstance(item, list | tuple):
            pending += item
        elif hasattr(item, "data"):
            pending += item.data
    return sets, wide
