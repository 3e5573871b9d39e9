"""The shapes and plain values of a sharded state as they travel to a new world: JSON, checked field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elastipod.in_memory.members import TensorShape
from elastipod.in_memory.parts import PartContent, ShardedShape
from elastipod.in_memory.state_manifest import BadManifest, read_digests


@dataclass(frozen=True, slots=True)
class StateShapes:
    """What a part's holder knows of the whole state. uncompared: digests of what ranks need not have in common, such as buffers."""

    shapes: tuple[ShardedShape, ...]
    values: str
    uncompared: Mapping[str, str]


def encode_shapes(shards: PartContent, uncompared: Mapping[str, str]) -> str:
    """Give the JSON text of a `StateShapes`. Its version is also that of the collectives which follow it."""
    listed = [[each.key, each.whole.dtype, list(each.whole.sizes), each.dim, each.is_on_mesh] for each in shards.shapes]
    return json.dumps({"v": 5, "tensors": listed, "values": shards.values, "uncompared": dict(uncompared)})


def decode_shapes(text: str) -> StateShapes:
    """Read what a holder told. Raises BadManifest for anything else."""
    try:
        found = json.loads(text)
        if found["v"] != 5:
            raise BadManifest(f"a holder's state has version {found['v']!r}; all ranks need the same elastipod")
        shapes = tuple(_shape(*each) for each in found["tensors"])
        uncompared = read_digests(found["uncompared"], {each.key for each in shapes if each.dim is None})
        return StateShapes(shapes, str(found["values"]), uncompared)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise BadManifest(f"a holder's description of its state cannot be read: {error!r}") from error


def _shape(key: object, dtype: object, sizes: list[object], dim: object, is_on_mesh: object) -> ShardedShape:
    lengths = tuple(int(str(size)) for size in sizes)
    if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
        raise BadManifest(f"{str(dtype)[:40]!r} is no type of a tensor")
    if min(lengths, default=0) < 0 or not (dim is None or (isinstance(dim, int) and 0 <= dim < len(lengths))):
        raise BadManifest(f"{str(key)[:40]!r} is said to be sharded along {dim!r} of {lengths}")
    return ShardedShape(TensorShape(str(key), str(dtype), lengths), dim, is_on_mesh is True)
