"""Meshes of which only the data-parallel axis stretches, over torch's process group that pretends to have peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from tests.guide import MESH
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import elastipod
from elastipod.errors import BatchSizeError
from elastipod.mesh import build_mesh, data_parallel, reads_data


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("axes", "world_size", "names", "places"),
    [
        pytest.param({}, 3, ("dp",), 3, id="DP"),
        pytest.param({"tp": 2}, 4, ("dp", "tp"), 2, id="TP x DP"),
        pytest.param({"tp": 2}, 2, ("dp", "tp"), 1, id="TP alone"),
        pytest.param({"pp": 2}, 6, ("pp", "dp"), 3, id="PP x DP"),
        pytest.param({"tp": 2, "pp": 2}, 8, ("pp", "dp", "tp"), 2, id="TP x PP x DP"),
        pytest.param({"shard": 2}, 6, ("dp", "shard"), 6, id="HSDP"),
        pytest.param({"cp": 2, "shard": 2, "tp": 2}, 16, ("dp", "shard", "cp", "tp"), 4, id="HSDP x CP x TP"),
    ],
)
def test_every_place_is_held_by_one_model_parallel_group(
    axes: dict[str, int], world_size: int, names: tuple[str, ...], places: int
) -> None:
    held, readers = Counter[int](), Counter[int]()
    for rank in range(world_size):
        with rank_of(rank, world_size):
            mesh = build_mesh(**axes, device_type="cpu")
            place = data_parallel(mesh)
            assert mesh.mesh_dim_names == names
            assert place.world_size == places
            held[place.rank] += 1
            readers[place.rank] += reads_data(mesh)
    assert held == dict.fromkeys(range(places), world_size // places)
    assert readers == dict.fromkeys(range(places), 1), "one rank of each loads and logs"


def test_neighbours_share_a_tensor_parallel_group() -> None:
    with rank_of(5, 16):
        mesh = build_mesh(tp=4, pp=2, device_type="cpu")
        assert mesh["tp"].mesh.tolist() == [4, 5, 6, 7]


def test_the_documents_512_cores() -> None:
    """Tensor parallel 32 with the 32 heads and 8 key/value heads of their model, pipeline parallel 8, data parallel 2."""
    places = set()
    for rank in (0, 31, 32, 63, 64, 511):
        with rank_of(rank, 512):
            mesh = build_mesh(tp=32, pp=8, heads=32, kv_heads=8, device_type="cpu")
            places.add((rank, data_parallel(mesh).rank))
            assert data_parallel(mesh).world_size == 2
    assert places == {(0, 0), (31, 0), (32, 1), (63, 1), (64, 0), (511, 1)}


def test_the_lines_of_the_user_guide_train_the_samples_of_a_data_parallel_rank() -> None:
    names: dict[str, Any] = {name: getattr(elastipod, name) for name in elastipod.__all__}
    plan = elastipod.ElasticBatches(128, 64)
    seen: list[int] = []
    with rank_of(9, 32):  # of tensor parallel group 1 of 2, in the first pipeline stage
        exec(MESH.replace("...", "seen.extend(batch.indices)"), {**names, "plan": plan, "seen": seen})
    assert seen == [index for batch in plan.iterate(1, 2) for index in batch.indices]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"tp": 4}, r"6 ranks form no whole model groups of 4 \(tensor 4\); world sizes that fit: 4, 8"),
        (
            {"tp": 3, "heads": 32, "kv_heads": 8},
            "tensor parallelism of 3 does not divide 32 heads and 8 key/value heads",
        ),
        ({"tp": 2, "heads": 8, "kv_heads": 3}, "8 heads cannot share 3 key/value heads"),
        ({"pp": 0}, "pipeline is 0; it must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is(axes: dict[str, Any], said: str) -> None:
    with rank_of(0, 6), pytest.raises(BatchSizeError, match=said):
        build_mesh(**axes, device_type="cpu")


def test_a_mesh_needs_a_process_group_and_a_data_parallel_axis() -> None:
    with pytest.raises(RuntimeError, match="process group; call"):
        build_mesh(tp=2)
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(BatchSizeError, match="the mesh has the dimensions tp, and none is named dp"):
            data_parallel(mesh)
