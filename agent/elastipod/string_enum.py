"""`enum.StrEnum`, which Python 3.10 lacks."""

from __future__ import annotations

from enum import Enum


class StringEnum(str, Enum):
    """An enumeration of words, whose members print as their values."""

    def __str__(self) -> str:
        return str(self.value)
