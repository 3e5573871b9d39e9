"""Seeded mutations of JSON values, as a careless or hostile writer would make them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from random import Random
from typing import Any

HUGE_TEXT = 200_000
DEPTHS = (3, 60)
# No recursion in Python gets to its end. Such a value cannot be copied, either: it comes in last.
TOO_DEEP = 5000
NUMBERS = (
    0, -1, 1, 2, 7, 65536, 2**31, 2**63, -(2**63), 10**40, 10**400, 0.5, -0.0, 1e308, math.inf, -math.inf, math.nan,
)  # fmt: skip
TEXTS = (
    "", " ", "x", "0", "-1", "true", "null", "٣", "²", "１２", "é", "日本語", "\x00", "\n", "\u2028", "🔥", "{}", "[", "z:", "a,b,,c",
    "9" * 5000, "2026-03-01T12:00:00Z", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59", "1" * 17, "../..", "a{99999999999}",
    "(" * 200, "%s%n", "$(NNODES)", "-" * 64,
)  # fmt: skip
# Not valid in UTF-8: an agent may send it, the API server never does.
SURROGATE = "\ud800"

Path = tuple[Any, ...]


def places(value: Any, path: Path = ()) -> list[Path]:
    """Give the paths of all values within one, that of the whole first."""
    found = [path]
    if isinstance(value, dict):
        found += [p for key, inner in value.items() for p in places(inner, (*path, key))]
    elif isinstance(value, list):
        found += [p for at, inner in enumerate(value) for p in places(inner, (*path, at))]
    return found


def at(value: Any, path: Path) -> Any:
    """Give the value at a path."""
    for key in path:
        value = value[key]
    return value


def odd_value(rng: Random) -> Any:
    """Give a value that hardly anybody expects."""
    kind = rng.randrange(9)
    if kind == 0:
        return None
    if kind == 1:
        return rng.random() < 0.5
    if kind in (2, 3):
        return rng.choice(NUMBERS)
    if kind in (4, 5):
        return rng.choice(TEXTS)
    if kind == 6:
        return rng.choice(("x", "日", "a,", "0-1,")) * (HUGE_TEXT // 4)
    if kind == 7:
        return rng.choice(([], {}, [None], [[]], {"": None}, [{}], {"name": []}, ["x", 1], [1] * 2000))
    return nested(rng, rng.choice(DEPTHS))


def nested(rng: Random, depth: int) -> Any:
    """Give a value within so many others."""
    value: Any = rng.choice((1, "x", None))
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"name": value}
    return value


def _drop(parent: Any, key: Any, rng: Random) -> None:
    del parent[key]


def _replace(parent: Any, key: Any, rng: Random) -> None:
    parent[key] = odd_value(rng)


def _negate(parent: Any, key: Any, rng: Random) -> None:
    before = parent[key]
    parent[key] = -before if isinstance(before, int | float) else rng.choice(NUMBERS)


def _repeat(parent: Any, key: Any, rng: Random) -> None:
    if isinstance(parent, list):
        parent += [copy.deepcopy(parent[key]) for _ in range(rng.choice((1, 1, 50)))]
    else:
        parent[key] = [parent[key], parent[key]]


def _swap(parent: Any, key: Any, rng: Random) -> None:
    keys = list(parent) if isinstance(parent, dict) else range(len(parent))
    other = rng.choice(list(keys))
    parent[key], parent[other] = parent[other], parent[key]


def _rename(parent: Any, key: Any, rng: Random) -> None:
    if isinstance(parent, dict):
        parent[rng.choice((f"{key}x", str(key).upper(), "", "日"))] = parent.pop(key)
    else:
        parent.reverse()


def _edit_text(parent: Any, key: Any, rng: Random) -> None:
    """Change a text a little; one that holds JSON is changed within."""
    before = parent[key]
    if not isinstance(before, str) or not before:
        parent[key] = rng.choice(TEXTS)
        return
    try:
        inner = json.loads(before)
    except (ValueError, RecursionError):
        inner = None
    if isinstance(inner, dict | list) and rng.random() < 0.8:
        parent[key] = json.dumps(mutated(inner, rng))
        return
    cut = rng.randrange(len(before))
    parent[key] = rng.choice(
        (before[:cut], before[cut:], before[::-1], before[:cut] + rng.choice(TEXTS[:20]) + before[cut:], before * 2, before.upper())
    )  # fmt: skip


OPERATIONS: tuple[Callable[[Any, Any, Random], None], ...] = (
    _drop, _replace, _replace, _replace, _negate, _repeat, _swap, _rename, _edit_text, _edit_text,
)  # fmt: skip


def mutated(value: Any, rng: Random, changes: int = 1) -> Any:
    """Give a copy with so many changes at places drawn anew for each; never at the whole itself."""
    value = copy.deepcopy(value)
    for _ in range(changes):
        found = places(value)[1:]
        if not found:
            break
        *path, key = rng.choice(found)
        rng.choice(OPERATIONS)(at(value, tuple(path)), key, rng)
    return value
