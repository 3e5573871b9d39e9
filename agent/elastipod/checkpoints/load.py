"""Filling a live state from a saved one, on whatever ranks there are now."""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from elastipod.checkpoints.files import Source, place_of
from elastipod.checkpoints.plan import Place
from elastipod.checkpoints.state import RANDOM, SCHEDULER

_OPTIONS = "optimizer.param_groups"  # torch's versions differ in the options that a group has
_NAMED = 3  # so many examples in a message


class Filling:
    """One load: what fits is known when it is made, and nothing has been changed yet."""

    def __init__(self, nested: dict[str, Any], source: Source) -> None:
        """Plan the copying of a saved state into the live tensors of ``nested``. Raises ValueError when they do not fit."""
        self._source = source
        self._planner = DefaultLoadPlanner(allow_partial_load=True)
        self._planner.set_up_planner(nested, source.metadata, is_coordinator=True)
        if problem := misfit(self._planner.state_dict, source.metadata):
            raise ValueError(problem)
        self._items = self._planner.finish_plan(self._planner.create_local_plan()).items

    def copy(self) -> None:
        """Copy the tensors, and put the saved plain values in the place of those there. Collective where the source is."""
        wanted: dict[Place, list[ReadItem]] = {}
        for item in self._items:
            if item.type == LoadItemType.BYTE_IO:
                self._planner.load_bytes(item, _as_bytes(self._source.value(item.storage_index.fqn)))
            else:
                wanted.setdefault(place_of(item.storage_index, self._source.metadata), []).append(item)
        for place, tensor in self._source.fetch(wanted):
            for item in wanted[place]:
                part = tensor
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dim, start, length)
                target = self._planner.resolve_tensor(item).detach()
                target.copy_(part)
                self._planner.commit_tensor(item, target)


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
