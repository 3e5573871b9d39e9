"""Parts of messages that are JSON already: what agents say for each other is handed on as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncodedJson:
    """A part of a body that is JSON already."""

    text: str
