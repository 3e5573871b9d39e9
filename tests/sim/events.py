"""The events of a schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Make(Enum):
    """What kind of agents a job has."""

    OURS = "ours"
    IN_PROCESS = "ours, with workers that outlive faults"
    KEEPING = "ours, with workers that keep their state in memory"
    SHARDING = "ours, with workers that keep shards of the state in memory"
    FOREIGN = "of another make"

    @property
    def keeps_state(self) -> bool:
        """Whether workers announce that they keep their state in memory."""
        return self in (Make.KEEPING, Make.SHARDING)


class Preparing(Enum):
    """What becomes of workers that agents start ahead of their first generation."""

    SUCCEEDS = "they come to the barrier"
    FAILS = "they end before it"
    HANGS = "they never come to it"
    DIES = "they end at it"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens. number: whom it hits, for the fault to interpret; seconds: how long it lasts."""

    at: float
    what: str
    number: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"Event({self.at:.1f}, {self.what!r}, {self.number}, {self.seconds:.1f})"
