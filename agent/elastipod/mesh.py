"""A device mesh of which only the data-parallel axis stretches, and the place of a rank among those with different samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elastipod.errors import BatchSizeError
from elastipod.parallelism import Parallelism
from elastipod.rank_in_world import RankInWorld

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DATA = "dp"
SHARD = "shard"
_AXES = (("pp", "pipeline"), (DATA, ""), (SHARD, "shard"), ("cp", "context"), ("tp", "tensor"))
_OTHER_AXES = {"pp", "cp", "tp", "ep"}  # their ranks train the same samples, or hold parts of a model


def build_mesh(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    shard: int = 1,
    device_type: str | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
) -> DeviceMesh:
    """Give the mesh of all ranks, with named dimensions: `pp`, `dp`, `shard`, `cp`, `tp`, from the outermost in.

    tp, pp, cp: tensor, pipeline and context parallelism; shard: ranks among which HSDP shards the weights of one replica. They
    are the same at every size, and `dp` is what is left of the world. A dimension of size 1 is left out, except `dp`. So
    ``mesh["tp"]`` is for `parallelize_module`, and ``mesh["dp"]`` (with HSDP ``mesh["dp", "shard"]``) for `fully_shard`. Ranks
    of one tensor-parallel group are neighbours, and so in one pod where it has that many workers.
    device_type: of the mesh; None: the accelerator of this machine, or cpu. heads, kv_heads: attention heads of the model, to
    be divided by tp; key/value heads may be fewer than tp, which replicates them.

    Collective: all ranks of the default process group call it at the same place, after `init_process_group`. Raises
    BatchSizeError, before anything is built, for a world that forms no whole model groups, with world sizes that do, and for
    heads that tp does not divide, and RuntimeError without a process group.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from elastipod.torch_compat import accelerator_type

    axes = Parallelism(tensor=tp, pipeline=pp, context=cp, shard=shard)
    if heads is not None or kv_heads is not None:
        axes.check_heads(heads or kv_heads or 0, kv_heads)
    if not dist.is_initialized():
        raise RuntimeError("a mesh spans the ranks of a process group; call torch.distributed.init_process_group first")
    sizes = {name: getattr(axes, axis) if axis else axes.groups(dist.get_world_size()) for name, axis in _AXES}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == DATA}
    return init_device_mesh(device_type or accelerator_type(), tuple(kept.values()), mesh_dim_names=tuple(kept))


def data_parallel(mesh: DeviceMesh) -> RankInWorld:
    """Give this rank's place among those that train different samples: what data and batches ask for as rank and world size.

    mesh: as `build_mesh` gives it, or any mesh whose data-parallel dimensions are named `dp` and `shard`. Ranks of one
    tensor-, pipeline- or context-parallel group have the same place. Not a collective. Raises BatchSizeError for a mesh
    without a dimension `dp`.
    """
    names = mesh.mesh_dim_names or ()
    if DATA not in names:
        raise BatchSizeError(f"the mesh has the dimensions {', '.join(names) or 'without names'}, and none is named dp")
    rank, world_size = mesh.get_local_rank(DATA), mesh.size(names.index(DATA))
    if SHARD in names:
        shards = mesh.size(names.index(SHARD))
        rank, world_size = rank * shards + mesh.get_local_rank(SHARD), world_size * shards
    return RankInWorld(rank, world_size)


def place_of(
    rank: int | None, world_size: int | None, dp_mesh: DeviceMesh | None, local_sizes: Sequence[int] = ()
) -> RankInWorld:
    """Give the place that a caller named by rank and world size, or by dp_mesh.

    dp_mesh: the whole mesh, as for `data_parallel`, or its data-parallel part: ``mesh["dp"]``, any one dimension that is not named
    after another axis, or dimensions whose names all begin with dp (``mesh["dp_replicate", "dp_shard"]``). Not a collective. Raises
    TypeError for both or neither, and BatchSizeError for a mesh that does not say which ranks train different samples.
    """
    if (rank is None or world_size is None) if dp_mesh is None else (rank, world_size) != (None, None):
        raise TypeError("give either rank and world_size, both among the data-parallel ranks, or dp_mesh")
    if dp_mesh is None:
        assert rank is not None
        assert world_size is not None
        return RankInWorld(rank, world_size, tuple(local_sizes))
    names = dp_mesh.mesh_dim_names or ()
    if DATA in names:
        return replace(data_parallel(dp_mesh), local_sizes=tuple(local_sizes))
    is_one = dp_mesh.ndim == 1 and not {*names} & _OTHER_AXES
    if not is_one and not (names and all(name.startswith(DATA) for name in names)):
        raise BatchSizeError(
            f"dp_mesh has the dimensions {', '.join(names) or 'without names'}, and none is named dp; give its data-parallel part, "
            'such as mesh["dp"]'
        )
    at = dp_mesh.get_coordinate()
    if at is None:
        raise BatchSizeError("this rank is not in dp_mesh; give each rank the mesh that it belongs to")
    found = 0
    for own, size in zip(at, dp_mesh.shape, strict=True):
        found = found * size + own
    return RankInWorld(found, dp_mesh.size(), tuple(local_sizes))


def logs_samples(dp_mesh: DeviceMesh | None) -> bool:
    """Give whether a rank logs its samples, where the caller does not say: one of those with the same samples, as far as the mesh tells."""
    return dp_mesh is None or DATA not in (dp_mesh.mesh_dim_names or ()) or reads_data(dp_mesh)


def reads_data(mesh: DeviceMesh) -> bool:
    """Give True on one of the ranks that train the same samples: the one that loads them for the others, and logs them.

    mesh: as for `data_parallel`. Not a collective.
    """
    return all(mesh.get_local_rank(name) == 0 for name in mesh.mesh_dim_names or () if name not in (DATA, SHARD))
