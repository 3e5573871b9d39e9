"""The mesh of a sharded state: what the script says of it once, and what that means in a world of any size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from elastipod.errors import ElastipodError
from elastipod.in_memory.parts import part_of
from elastipod.torch_compat import accelerator_type

USUAL = '{"shard": -1} (FSDP2) or {"replicate": -1, "shard": 4} (HSDP)'


class WorldDoesNotFit(ElastipodError, ValueError):
    """The ranks of a world cannot be divided as the mesh of the state says."""


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """Dimensions of a mesh, the outermost first; the last one is sharded, one before it replicated. -1: as many as there are ranks for."""

    dims: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, dims: Mapping[str, int]) -> MeshPlan:
        """Read what a script says, such as {"shard": -1} or {"replicate": -1, "shard": 4}. Raises TypeError, ValueError."""
        if not isinstance(dims, Mapping) or not all(map(_is_dimension, dims.items())):
            raise TypeError(f'mesh is {dims!r}; it must be a dictionary such as {{"shard": -1}}')
        names, sizes = list(dims), list(dims.values())
        if not 1 <= len(sizes) <= 2 or sizes.count(-1) != 1 or any(size < 1 for size in sizes if size != -1):
            raise ValueError(
                f"mesh is {dict(dims)!r}. It must have one or two dimensions. The last one is sharded. Exactly one has size -1: "
                f"{USUAL}"
            )
        if names[-1] == "replicate" or "shard" in names[:-1]:
            raise ValueError(
                f"mesh is {dict(dims)!r}, but the last dimension is the one that is sharded, whatever its name: {USUAL}"
            )
        return cls(tuple(dims.items()))

    def sizes(self, world_size: int) -> tuple[int, ...]:
        """Give the size of each dimension. Raises WorldDoesNotFit."""
        fixed = math.prod(size for _, size in self.dims if size != -1)
        if world_size % fixed:
            raise WorldDoesNotFit(
                f"a world of {world_size} ranks cannot be divided by the mesh {dict(self.dims)}; the job needs a multiple of {fixed}: "
                "set replicaIncrementStep so that every size is one"
            )
        return tuple(world_size // fixed if size == -1 else size for _, size in self.dims)

    def num_shards(self, world_size: int) -> int:
        """Give the number of ranks that together hold one whole state."""
        return self.sizes(world_size)[-1]

    def part(self, rank: int, world_size: int) -> int:
        """Give the part that a rank holds."""
        num_shards = self.num_shards(world_size)
        return part_of(num_shards, rank % num_shards)

    def build(self, world_size: int) -> Any:
        """Give the DeviceMesh of the present world. Collective over the default group."""
        from torch.distributed.device_mesh import init_device_mesh

        names = tuple(name for name, _ in self.dims)
        return init_device_mesh(accelerator_type(), self.sizes(world_size), mesh_dim_names=names)


def _is_dimension(item: tuple[object, object]) -> bool:
    name, size = item
    return isinstance(name, str) and isinstance(size, Integral) and not isinstance(size, bool)
