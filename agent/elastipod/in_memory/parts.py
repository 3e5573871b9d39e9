"""How a sharded state lies over the ranks of a world: parts, the stretch of each tensor that a part has, and what one rank holds.

A part is one shard group's share number ``index`` of ``num_shards``. A tensor is sharded along one dimension, in the equal steps of
`torch.chunk`, as FSDP2 does it, or whole on every rank. So the place of every byte follows from shapes and the number of shards, and
a new world needs one rank's list of shapes, where checkpoints, which know any layout, gather all ranks' tables of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from elastipod.errors import ElastipodError
from elastipod.in_memory.members import Content, Members, TensorShape
from elastipod.in_memory.tensor_digests import as_bytes
from elastipod.rank_ranges import format_ranks
from elastipod.torch_compat import DTensor, sharded_tensor

_INDEX_BITS = 20


class UnknownSharding(ElastipodError):
    """A tensor is sharded in a way that a state in memory cannot move to another world."""


def part_of(num_shards: int, index: int) -> int:
    """Give the number of a part; parts of different layouts have different numbers, and none is that of replicated state."""
    return num_shards << _INDEX_BITS | index


def place_of(part: int) -> tuple[int, int]:
    """Give the number of shards and the index of a part."""
    return part >> _INDEX_BITS, part & ((1 << _INDEX_BITS) - 1)


def parts_of(num_shards: int) -> frozenset[int]:
    """Give all parts of a layout."""
    return frozenset(part_of(num_shards, index) for index in range(num_shards))


@dataclass(frozen=True, slots=True)
class ShardedShape:
    """What is known of a tensor without its content.

    whole: its global shape. dim: that it is sharded along; None: whole on every rank. is_on_mesh: a tensor that is whole is one of the
    mesh all the same, as those of optimizers may be.
    """

    whole: TensorShape
    dim: int | None
    is_on_mesh: bool = False

    @property
    def key(self) -> str:
        return self.whole.key

    def rows(self, part: int) -> tuple[int, int]:
        """Give the first row along ``dim`` that a part has, and the first that it no longer has."""
        num_shards, index = place_of(part)
        rows = self.whole.sizes[self._dim]
        step = -(-rows // num_shards)
        return min(index * step, rows), min((index + 1) * step, rows)

    def stretch(self, part: int) -> tuple[int, int]:
        """Give the bytes that a part has, as start and end, with ``dim`` taken as the outermost dimension."""
        if self.dim is None:
            return 0, self.whole.num_bytes
        start, stop = self.rows(part)
        row_bytes = self.whole.num_bytes // max(1, self.whole.sizes[self.dim])
        return start * row_bytes, stop * row_bytes

    def local_sizes(self, part: int) -> tuple[int, ...]:
        """Give the shape of a part's tensor."""
        if self.dim is None:
            return self.whole.sizes
        start, stop = self.rows(part)
        return (*self.whole.sizes[: self.dim], stop - start, *self.whole.sizes[self.dim + 1 :])

    def bytes_of(self, local: torch.Tensor) -> torch.Tensor:
        """Give the bytes of a part's tensor, ``dim`` outermost: its own memory where that is in this order, else a copy."""
        return as_bytes(local.movedim(self.dim, 0) if self.dim else local)

    def put_bytes(self, local: torch.Tensor, raw: torch.Tensor) -> None:
        """Write bytes of `bytes_of` back into the tensor, unless they are its own memory."""
        if raw.data_ptr() != local.data_ptr() and raw.numel():
            outer = local.movedim(self.dim, 0) if self.dim else local
            outer.copy_(raw.view(local.dtype).view(outer.shape))

    @property
    def _dim(self) -> int:
        assert self.dim is not None, self.key
        return self.dim


@dataclass(frozen=True, slots=True)
class PartContent:
    """One part of the state: local tensors by key, and the plain values. shapes: of every tensor, in the order of the members."""

    part: int
    shapes: tuple[ShardedShape, ...]
    tensors: Mapping[str, torch.Tensor]
    values: str

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def live_part(members: Members, part: int) -> PartContent:
    """Give the part of the state that the members of this rank are: their own tensors, on any device.

    Raises UnknownSharding, which names the tensor.
    """
    content = members.content()
    shapes = tuple(shape_of(key, tensor) for key, tensor in content.tensors.items())
    return PartContent(part, shapes, {key: local_of(each) for key, each in content.tensors.items()}, content.values)


def part_content(members: Members, part: int, progress: Callable[[], None] = lambda: None) -> PartContent:
    """Give the same in host memory: the members' own tensors where they lie there, else copies. Raises as `live_part`.

    progress: called after each tensor; the copy of a large one from a device takes its time.
    """
    live = live_part(members, part)
    tensors: dict[str, torch.Tensor] = {}
    for key, each in live.tensors.items():
        tensors[key] = each.to("cpu")
        progress()
    return replace(live, tensors=tensors)


def shape_of(key: str, tensor: torch.Tensor) -> ShardedShape:
    """Describe a live tensor. Raises UnknownSharding."""
    whole = TensorShape(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return ShardedShape(whole, None)
    if not can_move(tensor):
        raise UnknownSharding(
            f"{key} is placed as {tensor.placements}; a state in memory needs tensors that are whole on every rank or divided as by "
            "fully_shard: along one dimension, over the last of the mesh"
        )
    last: Any = tensor.placements[-1]
    return ShardedShape(whole, None, True) if last.is_replicate() else ShardedShape(whole, last.dim)


def can_move(tensor: torch.Tensor) -> bool:
    """Whether a state in memory can move a tensor to another world."""
    if not isinstance(tensor, DTensor):
        return True
    *outer, last = tensor.placements
    return (type(last).__name__ == "Shard" or last.is_replicate()) and all(each.is_replicate() for each in outer)


def check_meshes(members: Members, mesh: Any) -> None:
    """Raise UnknownSharding for a parameter or buffer that is divided over other ranks than the last dimension of this mesh.

    Parts are numbered along that dimension: what is divided in another way would be filled with the rows of others.
    """
    own = _ranks_along_last(mesh)
    for name, module in members.items():
        if not isinstance(module, nn.Module):
            continue
        for key, tensor in (*module.named_parameters(name), *module.named_buffers(name)):
            if not isinstance(tensor, DTensor) or not can_move(tensor) or tensor.placements[-1].is_replicate():
                continue
            found = _ranks_along_last(tensor.device_mesh)
            if found != own:
                raise UnknownSharding(
                    f"{key} is divided over {format_ranks(found)}, and the mesh of State divides over {format_ranks(own)}; pass the mesh "
                    "that build gets as mesh= to every fully_shard"
                )


def _ranks_along_last(mesh: Any) -> list[int]:
    """Give the ranks that differ from this one in the last dimension of a mesh alone, in their order; none outside of it."""
    place = mesh.get_coordinate()
    ranks: list[int] = [] if place is None else mesh.mesh[tuple(place[:-1])].tolist()
    return ranks


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Give this rank's own part of a tensor: the same memory."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():  # a DTensor's own detach takes several times as long
            tensor = tensor.to_local()
    return tensor.detach()


def room_for(shapes: tuple[ShardedShape, ...], part: int, members: Members, mesh: Any) -> Content:
    """Give tensors of a part to be filled, as content to load: the live ones, and new ones where an optimizer has none yet.

    mesh: of the present world. Raises UnknownSharding when this world divides a tensor along another dimension.
    """
    live = members.content().tensors
    tensors: dict[str, torch.Tensor] = {}
    for shape in shapes:
        own = live.get(shape.key)
        if own is not None and shape_of(shape.key, own) == shape:
            tensors[shape.key] = own
            continue
        if own is not None and shape.key.startswith("model."):
            was, now = (_described(each) for each in (shape, shape_of(shape.key, own)))
            raise UnknownSharding(
                f"{shape.key} was {was} in the former world, and is {now} now; build() has to make each parameter alike in every world, "
                "and shard_placement_fn to divide it along the same dimension whatever the number of ranks"
            )
        tensors[shape.key] = _new_tensor(shape, part, members, mesh)
    return Content(tensors, "")


def _described(shape: ShardedShape) -> str:
    how = "whole on every rank" if shape.dim is None else f"divided along dimension {shape.dim}"
    return f"{shape.whole.dtype} of {tuple(shape.whole.sizes)}, {how}"


def _new_tensor(shape: ShardedShape, part: int, members: Members, mesh: Any) -> torch.Tensor:
    is_counter = not shape.whole.sizes  # optimizers keep their step counts on the host
    device = torch.device("cpu") if is_counter else next(members.model.parameters()).device
    local = torch.empty(shape.local_sizes(part), dtype=getattr(torch, shape.whole.dtype), device=device)
    if shape.dim is None and not shape.is_on_mesh:
        return local
    from torch.distributed.tensor import Replicate, Shard

    last = Replicate() if shape.dim is None else Shard(shape.dim)
    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), last]
    return sharded_tensor(local, mesh, placements, torch.Size(shape.whole.sizes))
