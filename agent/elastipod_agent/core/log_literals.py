"""Literals that a line must contain to match a pattern. They are found once per rule; other lines need no regular expression."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

# Python's own pattern parser. Its result is undocumented, so anything unknown means "no literal".
_parser: Any = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_SHORTEST = 3  # shorter texts are in too many lines
_MAX_ALTERNATIVES = 8


def required_literals(*patterns: str | None) -> tuple[bytes, ...] | None:
    """Give literals of which every matching line contains at least one; None if there are none."""
    found: list[bytes] = []
    for pattern in patterns:
        if pattern is None:
            continue
        texts = _texts(pattern)
        if texts is None:
            return None
        found += (text.encode("utf-8") for text in texts)
    return tuple(dict.fromkeys(found))


def has_leading_wildcard(pattern: str) -> bool:
    """Tell whether the pattern begins with ``.*``, so that matching at the first character is equivalent to searching.

    A search would try such a pattern at every character of a line that does not match, each time up to the end of the line.
    """
    try:
        op, argument = _parser.parse(pattern)[0]
        return str(op) == "MAX_REPEAT" and argument[0] == 0 and _is_any(argument)
    except Exception:  # the parser differs between versions; searching is always correct
        return False


def _is_any(repeat: Any) -> bool:
    _, most, what = repeat
    return str(most) == "MAXREPEAT" and len(what) == 1 and str(what[0][0]) == "ANY"


def _texts(pattern: str) -> frozenset[str] | None:
    try:
        tree = _parser.parse(pattern)
        if tree.state.flags & re.IGNORECASE:
            return None
        texts = _of_sequence(tree)
        for text in texts or ():
            text.encode("utf-8")
        return texts
    except Exception:  # as above: without a literal every line is matched
        return None


def _of_sequence(items: Iterable[Any]) -> frozenset[str] | None:
    """Give the best part of a sequence: the one whose shortest literal is longest."""
    choices: list[frozenset[str]] = []
    run = ""
    for op, argument in items:
        name = str(op)
        if name == "LITERAL":
            run += chr(argument)
        elif name != "AT":  # a position matches no characters
            choices.append(frozenset({run}))
            run = ""
            choices.append(_of_part(name, argument) or frozenset({""}))
    choices.append(frozenset({run}))
    best = max(choices, key=_worth)
    return best if min(map(len, best)) >= _SHORTEST else None


def _of_part(name: str, argument: Any) -> frozenset[str] | None:
    if name == "SUBPATTERN":
        _, added_flags, _, inner = argument
        return None if added_flags & re.IGNORECASE else _of_sequence(inner)
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, _, inner = argument
        return _of_sequence(inner) if least > 0 else None
    if name == "ATOMIC_GROUP":
        return _of_sequence(argument)
    if name == "BRANCH":
        return _of_branches(argument[1])
    return None


def _of_branches(branches: Sequence[Any]) -> frozenset[str] | None:
    found: set[str] = set()
    for branch in branches:
        texts = _of_sequence(branch)
        if texts is None:
            return None
        found |= texts
    return frozenset(found) if len(found) <= _MAX_ALTERNATIVES else None


def _worth(texts: frozenset[str]) -> tuple[int, int]:
    return min(map(len, texts)), -len(texts)
