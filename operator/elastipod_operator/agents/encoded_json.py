"""Parts of messages that are JSON already: data of agents for each other is passed on as text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncodedJson:
    """A part of a body that is JSON already."""

    text: str
