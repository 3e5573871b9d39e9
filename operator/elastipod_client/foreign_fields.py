"""Blocks of fields that are converted: what nobody asks for is named, so nothing is dropped in silence. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elastipod_operator.kube.reading import mapping

GANGS = "gangs need no scheduler of their own; for quota, label the job kueue.x-k8s.io/queue-name"


class UnknownJobError(ValueError):
    """The manifest is of no kind that can be converted; the text says which it is."""


@dataclass
class Fields:
    """The fields of a block that are still to be converted; what is left at the end has no counterpart."""

    path: str
    body: dict[str, Any]
    lost: list[str]
    taken: set[str] = field(default_factory=set)

    def take(self, name: str) -> Any:
        """Give a field, None if it is absent; it counts as converted."""
        self.taken.add(name)
        return self.body.get(name)

    def block(self, name: str) -> Fields:
        """Give a block below this one, empty if it is absent."""
        return Fields(f"{self.path}.{name}", dict(mapping(self.take(name))), self.lost)

    def lose(self, name: str, why: str) -> None:
        """Say that a field has no counterpart, if it is there."""
        if self.take(name) is not None:
            self.lost.append(f"{self.path}.{name}: {why}")

    def finish(self) -> None:
        """Name every field that nobody has asked for."""
        for name in self.body.keys() - self.taken:
            self.lost.append(f"{self.path}.{name}: it has no counterpart that is known here")
