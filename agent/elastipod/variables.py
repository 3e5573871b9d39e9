"""Numbers that a launcher or a user sets in environment variables."""

from __future__ import annotations

import os


def int_from_env(name: str, default: int | None = None) -> int:
    """Give a whole number, or the default where the variable is not set. Raises ValueError, with its name, for anything else."""
    return int(_number(int, name, default, "a whole number"))


def float_from_env(name: str, default: float) -> float:
    """Give a number, or the default where the variable is not set. Raises ValueError, with its name, for anything else."""
    return _number(float, name, default, "a number")


def _number(kind: type[float], name: str, default: float | None, wanted: str) -> float:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise ValueError(f"{name} is not set; it must be {wanted}")
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; it must be {wanted}") from None
