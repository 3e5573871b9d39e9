"""How errors speak of a value that a script has passed or returned."""

from __future__ import annotations

from collections.abc import Sequence

_PLAIN = (bool, int, float, str, bytes, list, tuple, dict, set)


def kind_of(value: object) -> str:
    """Give the class of a value with its article, such as "an int"; None is "None"."""
    name = type(value).__name__
    if value is None:
        return "None"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def first_of(names: Sequence[str], most: int) -> str:
    """Give the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def value_or_kind(value: object) -> str:
    """Give a plain value as it is, and the kind of any other."""
    return f"{value!r:.80}" if isinstance(value, _PLAIN) else kind_of(value)
