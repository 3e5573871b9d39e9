"""Members of the state that are neither model nor optimizer nor schedule: a GradScaler, a loader, averages of one's own.

Their plain values are one JSON text each; their tensors are tensors of the checkpoint, sharded ones too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from elastipod.checkpoint.live_objects import Stateful
from elastipod.checkpoint.value_codec import decode_value, encode_value
from elastipod.checkpoint.value_tree import join_tensors, split_tensors
from elastipod.errors import CheckpointError
from elastipod.torch_compat import DTensor

STATEFUL, VALUES, TENSORS = "stateful", "values", "tensors"


def values_key(name: str) -> str:
    """Return the key of a member's plain values."""
    return f"{STATEFUL}.{name}.{VALUES}"


def stateful_state(members: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the state of members by name, as part of a nested state. Raises CheckpointError for a value that cannot be saved."""
    found: dict[str, Any] = {}
    for name, member in members.items():
        tensors: dict[str, torch.Tensor] = {}
        tree = split_tensors(member.state_dict(), name, tensors)
        try:
            found[name] = {VALUES: encode_value(tree, f"the state of {name}")}
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        if tensors:
            found[name][TENSORS] = tensors
    return found


def stateful_to_fill(members: Mapping[str, Stateful], saved: Metadata) -> dict[str, Any]:
    """Return memory for the saved tensors of members, by name; the members are not changed.

    A tensor that is sharded over the ranks here is sharded in the same way there.
    """
    live: dict[str, dict[str, torch.Tensor]] = {}
    for name, member in members.items():
        split_tensors(member.state_dict(), name, live.setdefault(name, {}))
    found: dict[str, Any] = {}
    for key, path in (saved.planner_data or {}).items():
        entry = saved.state_dict_metadata[key]
        if tuple(path[:1]) != (STATEFUL,) or path[1] not in members or not isinstance(entry, TensorStorageMetadata):
            continue
        own = live[path[1]].get(path[3])
        room = (
            torch.empty_like(own)
            if isinstance(own, DTensor) and own.shape == entry.size
            else torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        )
        found.setdefault(path[1], {}).setdefault(TENSORS, {})[path[3]] = room
    return found


def load_stateful(member: Stateful, text: str, filled: Mapping[str, Any]) -> None:
    """Load a member's state. text: its values; filled: its part of `stateful_to_fill`, with the tensors filled."""
    member.load_state_dict(join_tensors(decode_value(text), filled.get(TENSORS, {})))
