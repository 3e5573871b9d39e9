"""What a load returns: where training continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Tier = Literal["memory", "durable"]


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run continues. step: completed optimizer steps; generation and world_size: of the run that saved it.

    path: of the checkpoint; an address if it is in an object store. tier: where it was read from. missing, unexpected: with
    strict=False, keys that the checkpoint lacks, and keys of it that were not loaded. holders: the ranks that have loaded it; None:
    all have, as after every call but `CheckpointManager.load_on_holders`. has_changed: whether this rank's objects are no longer
    what they were, which may be so on a rank that has not loaded it, too.
    """

    step: int
    generation: int
    world_size: int
    path: Path | str
    extra: Mapping[str, Any] = field(default_factory=dict)
    tier: Tier = "durable"
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    holders: tuple[int, ...] | None = None
    has_changed: bool = True
