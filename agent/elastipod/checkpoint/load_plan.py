"""Filling a live state from a saved one, on the present ranks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType

from elastipod.checkpoint.dcp_format import chunk_index
from elastipod.checkpoint.optimizer_state import OPTIMIZER, SavedState
from elastipod.checkpoint.save_plan import Chunk, ChunkIndex
from elastipod.checkpoint.stateful_members import STATEFUL
from elastipod.checkpoint.training_state import RANDOM, SCHEDULER

_OPTIONS = "optimizer.param_groups"  # torch's versions differ in the options of a group
_OWN_CHECKS = (_OPTIONS, f"{RANDOM}.", SCHEDULER, f"{STATEFUL}.")  # what is asked for by name, and may be left out
_NAMED = 3  # examples in a message


class LoadPlan:
    """One load. Creating it checks that the saved state fits; nothing is changed until it is used."""

    def __init__(
        self, nested: dict[str, Any], source: SavedState, *, strict: bool = True, elsewhere: Collection[str] = ()
    ) -> None:
        """Plan the copying of a saved state into the live tensors of ``nested``. Raises ValueError when they do not fit.

        strict: if not, what only one side has is listed in ``missing`` (nested) and ``unexpected`` (saved), and stays as it is.
        elsewhere: keys that other stages of a pipeline load.
        """
        self._nested, self._source = nested, source
        self._planner = DefaultLoadPlanner(allow_partial_load=True)
        self._planner.set_up_planner(nested, source.metadata, is_coordinator=True)
        flat = self._planner.state_dict
        self.missing = tuple(_missing(flat, source.metadata))
        known = {*flat, *elsewhere}
        self.unexpected = tuple(_unexpected(known, source.metadata, has_optimizer=OPTIMIZER in nested))
        if strict and self.missing:
            raise ValueError(f"it has no {list_some(self.missing)}")
        if strict and self.unexpected:
            whose = "this model and optimizer have" if OPTIMIZER in nested else "this model has"
            raise ValueError(f"it also has {list_some(self.unexpected)}, which {whose} not")
        if problem := _describe_other_shape(flat, source.metadata):
            raise ValueError(problem)
        # torch's plan of a plain state says that each tensor is its one chunk, and takes half of a load of such a state.
        self._is_plain = all(
            _is_one_chunk(each, source.metadata.state_dict_metadata.get(key)) for key, each in flat.items()
        )
        self._items = [] if self._is_plain else self._planner.finish_plan(self._planner.create_local_plan()).items

    def targets(self) -> dict[ChunkIndex, list[LoadTarget]]:
        """Return what is to be filled from each chunk; tensors are filled in place."""
        if self._is_plain:
            whole = {(key, (0,) * each.dim()): each.detach() for key, each in self._planner.state_dict.items()}
            return {place: [LoadTarget(place[1], tuple(each.shape), each)] for place, each in whole.items()}
        wanted: dict[ChunkIndex, list[LoadTarget]] = {}
        for item in self._items:
            if item.type != LoadItemType.BYTE_IO:
                tensor = self._planner.resolve_tensor(item).detach()
                target = LoadTarget(tuple(item.storage_offsets), tuple(item.lengths), tensor)
                wanted.setdefault(chunk_index(item.storage_index, self._source.metadata), []).append(target)
        return wanted

    def copy_values(self) -> None:
        """Replace the plain values by the saved ones."""
        for item in self._items:
            if item.type == LoadItemType.BYTE_IO:
                key = item.storage_index.fqn
                *path, last = self._planner.mappings[key]
                holder: Any = self._nested
                for each in path:
                    holder = holder[each]
                holder[last] = self._source.value(key)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """A part of a live tensor, and the part of a saved chunk that belongs there: ``starts`` and ``lengths`` by dimension."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    tensor: torch.Tensor

    def fill(self, chunk: torch.Tensor) -> None:
        for dim, (start, length) in enumerate(zip(self.starts, self.lengths, strict=True)):
            chunk = chunk.narrow(dim, start, length)
        self.tensor.copy_(chunk)

    def byte_range(self, chunk: Chunk) -> tuple[int, int]:
        """Return the first and last byte of the chunk that the target lies in: whole rows of its first dimension."""
        if not chunk.sizes:
            return 0, chunk.num_bytes
        row = chunk.num_bytes // chunk.sizes[0] if chunk.num_bytes else 0
        return self.starts[0] * row, (self.starts[0] + self.lengths[0]) * row

    def direct_view(self, chunk: Chunk) -> torch.Tensor | None:
        """Return the target's bytes if those of `byte_range` can be copied there unchanged; None if they need a conversion.

        64-bit words of the chunk are aligned there as well.
        """
        tensor = self.tensor
        is_same = self.lengths[1:] == chunk.sizes[1:] and tensor.dtype == getattr(torch, chunk.dtype)
        if not is_same or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        first, _ = self.byte_range(chunk)
        if (tensor.storage_offset() * tensor.element_size() - first) % 8:
            return None
        return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # a single element may have any stride

    def fill_from_bytes(self, raw: torch.Tensor, chunk: Chunk) -> None:
        """Fill from the bytes of `byte_range`."""
        rows = raw.view(getattr(torch, chunk.dtype)).view((*self.lengths[:1], *chunk.sizes[1:]))
        replace(self, starts=(*(0 for _ in self.starts[:1]), *self.starts[1:])).fill(rows)


def _is_one_chunk(value: object, saved: object) -> bool:
    """Return whether this is a plain tensor that was saved in one piece."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and isinstance(saved, TensorStorageMetadata) and len(saved.chunks) == 1


def _describe_other_shape(flat: dict[str, Any], metadata: Metadata) -> str | None:
    """Return a sentence on a tensor that was saved with another shape, None if there is none."""
    saved = metadata.state_dict_metadata
    for key, tensor in flat.items():
        if not isinstance(tensor, torch.Tensor) or key not in saved:
            continue
        found = saved[key]
        if not isinstance(found, TensorStorageMetadata):
            return f"its {key} is no tensor"
        if tuple(found.size) != tuple(tensor.size()):
            return f"its {key} has the shape {list(found.size)}, here it is {list(tensor.size())}"
    return None


def _missing(flat: dict[str, Any], metadata: Metadata) -> list[str]:
    """Return the keys that the saved state has not."""
    return [key for key in flat if key not in metadata.state_dict_metadata and not key.startswith(_OPTIONS)]


def _unexpected(known: Collection[str], metadata: Metadata, *, has_optimizer: bool) -> list[str]:
    """Return the keys that only the saved state has."""
    others = _OWN_CHECKS if has_optimizer else (*_OWN_CHECKS, f"{OPTIMIZER}.")
    return [key for key in metadata.state_dict_metadata if key not in known and not key.startswith(others)]


def flat_keys(nested: dict[str, Any], source: SavedState) -> set[str]:
    """Return the keys of a nested state, as in checkpoints."""
    planner = DefaultLoadPlanner(allow_partial_load=True)
    planner.set_up_planner(nested, source.metadata, is_coordinator=False)
    return set(planner.state_dict)


def list_some(keys: Collection[str]) -> str:
    """Return the first keys as text, and how many more there are."""
    named = ", ".join(sorted(keys)[:_NAMED])
    return named if len(keys) <= _NAMED else f"{named} and {len(keys) - _NAMED} more"
