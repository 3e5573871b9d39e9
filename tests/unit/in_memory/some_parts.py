"""Parts of a small sharded state, whose numbers tell their place."""

from __future__ import annotations

import torch

from elastipod.in_memory.members import Members, TensorShape
from elastipod.in_memory.parts import PartContent, ShardedShape

ROWS = 7  # of a tensor: no two parts of three are of one length with those of two
SHAPES = (
    ShardedShape(TensorShape("model.w", "float32", (ROWS, 2)), 0),
    ShardedShape(TensorShape("model.v", "int64", (2, ROWS)), 1),
    ShardedShape(TensorShape("step", "float64", ()), None),
)
BYTES = [3 * (8 + 16) + 8, 3 * (8 + 16) + 8, 1 * (8 + 16) + 8]  # of each of three parts


def no_progress() -> None:
    """Let it be."""


def whole(shape: ShardedShape) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, shape.whole.dtype)
    return torch.arange(torch.Size(shape.whole.sizes).numel()).reshape(shape.whole.sizes).to(dtype)


def content(_: Members | None, part: int, *_progress: object) -> PartContent:
    """Give a part of tensors whose numbers tell their place."""
    tensors = {}
    for shape in SHAPES:
        tensors[shape.key] = whole(shape)
        if shape.dim is not None:
            start, stop = shape.rows(part)
            tensors[shape.key] = tensors[shape.key].narrow(shape.dim, start, stop - start).contiguous()
    return PartContent(part, SHAPES, tensors, "the values")
