"""Filling a live state from a saved one, on whatever ranks there are now."""

from __future__ import annotations

import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from elastipod.checkpoints.files import place_of
from elastipod.checkpoints.plan import Place
from elastipod.checkpoints.state import RANDOM, SCHEDULER

_OPTIONS = "optimizer.param_groups"  # torch's versions differ in the options that a group has
_NAMED = 3  # so many examples in a message


class Saved(Protocol):
    """What of a saved state is known before its tensors are read."""

    metadata: Metadata

    def value(self, key: str) -> Any:
        """Give a plain value."""


class Filling:
    """One load: what fits is known when it is made, and nothing has been changed yet."""

    def __init__(self, nested: dict[str, Any], source: Saved) -> None:
        """Plan the copying of a saved state into the live tensors of ``nested``. Raises ValueError when they do not fit."""
        self._source = source
        self._planner = DefaultLoadPlanner(allow_partial_load=True)
        self._planner.set_up_planner(nested, source.metadata, is_coordinator=True)
        if problem := misfit(self._planner.state_dict, source.metadata):
            raise ValueError(problem)
        self._items = self._planner.finish_plan(self._planner.create_local_plan()).items

    def parts(self) -> dict[Place, list[Part]]:
        """Give what is to be filled from which chunk; tensors are filled in place."""
        wanted: dict[Place, list[Part]] = {}
        for item in self._items:
            if item.type != LoadItemType.BYTE_IO:
                target = self._planner.resolve_tensor(item).detach()
                part = Part(tuple(item.storage_offsets), tuple(item.lengths), target)
                wanted.setdefault(place_of(item.storage_index, self._source.metadata), []).append(part)
        return wanted

    def copy_values(self) -> None:
        """Put the saved plain values in the place of those there."""
        for item in self._items:
            if item.type == LoadItemType.BYTE_IO:
                self._planner.load_bytes(item, _as_bytes(self._source.value(item.storage_index.fqn)))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a live tensor, and which part of a saved chunk belongs there: from ``starts`` on, of sizes ``lengths``."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor

    def fill(self, chunk: torch.Tensor) -> None:
        for dim, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            chunk = chunk.narrow(dim, start, length)
        self.target.copy_(chunk)

    def memory_of_all(self, dtype: torch.dtype, sizes: Sequence[int]) -> torch.Tensor | None:
        """Give the target's bytes where a whole chunk can go into them as it is; None where it must be converted or cut."""
        target = self.target
        is_same = self.lengths == tuple(sizes) and target.dtype == dtype and target.device.type == "cpu"
        if not is_same or not target.is_contiguous() or target.storage_offset() * target.element_size() % 8:
            return None
        return target.view(-1).view(torch.uint8)


def misfit(flat: dict[str, Any], metadata: Metadata) -> str | None:
    """Say in a sentence what a saved state and a live one do not have in common; None when they fit."""
    saved = metadata.state_dict_metadata
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    if missing := [key for key in flat if key not in saved and not key.startswith(_OPTIONS)]:
        return f"it has no {_listed(missing)}"
    if left := [key for key in saved if key not in flat and not key.startswith((_OPTIONS, f"{RANDOM}.", SCHEDULER))]:
        return f"it also has {_listed(left)}, which this model and optimizer have not"
    for key, tensor in tensors.items():
        found = saved[key]
        if not isinstance(found, TensorStorageMetadata):
            return f"its {key} is no tensor"
        if tuple(found.size) != tuple(tensor.size()):
            return f"its {key} has the shape {list(found.size)}, here it is {list(tensor.size())}"
    return None


def _listed(keys: Collection[str]) -> str:
    named = ", ".join(sorted(keys)[:_NAMED])
    return named if len(keys) <= _NAMED else f"{named} and {len(keys) - _NAMED} more"


def _as_bytes(value: object) -> io.BytesIO:
    content = io.BytesIO()
    torch.save(value, content)
    content.seek(0)
    return content
