"""Meshes of which only the data-parallel axis stretches, over torch's process group that pretends to have peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.guide import MESH
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


def mesh_of(**dims: int) -> Any:
    return init_device_mesh("cpu", tuple(dims.values()), mesh_dim_names=tuple(dims))


@pytest.mark.parametrize(
    ("make_mesh", "place"),
    [
        pytest.param(lambda: build_mesh(tp=2, device_type="cpu"), (1, 4), id="the whole mesh"),
        pytest.param(lambda: build_mesh(tp=2, device_type="cpu")["dp"], (1, 4), id="its data-parallel part"),
        pytest.param(lambda: build_mesh(shard=2, tp=2, device_type="cpu"), (1, 4), id="HSDP"),
        pytest.param(lambda: DeviceMesh("cpu", [0, 1, 2, 3]), (3, 4), id="one dimension without a name"),
        pytest.param(lambda: mesh_of(data=4, tp=2)["data"], (1, 4), id="one dimension of another name"),
        pytest.param(
            lambda: mesh_of(dp_replicate=2, dp_shard=2, tp=2)["dp_replicate", "dp_shard"],
            (1, 4),
            id="dimensions that begin with dp",
        ),
    ],
)
def test_everything_that_asks_for_rank_and_world_size_takes_a_mesh(
    make_mesh: Any, place: tuple[int, int], tmp_path: Path
) -> None:
    plan = elastipod.ElasticBatches(16, 8)
    data: Any = list(range(16))
    with rank_of(3, 8):
        mesh = make_mesh()
        by_numbers = [batch.indices for batch in plan.iterate(*place)]
        assert [batch.indices for batch in plan.iterate(dp_mesh=mesh)] == by_numbers
        assert plan.batch(2, dp_mesh=mesh).indices == by_numbers[1]
        loader = elastipod.ElasticLoader[Any](data, plan, dp_mesh=mesh, micro_batch=8)
        assert [batch.indices for batch, passes in loader if [*passes]] == by_numbers
        sampler = elastipod.ElasticBatchSampler(plan, dp_mesh=mesh, micro_batch=8)
        assert [*sampler] == [list(each) for each in by_numbers]
        cached = elastipod.BatchCache(tmp_path / "cache").iterate(
            plan, lambda batch: torch.tensor(batch.indices), dp_mesh=mesh
        )
        assert [tuple(tensors.tolist()) for _, tensors in cached if isinstance(tensors, torch.Tensor)] == by_numbers
        assert elastipod.plan_batch(8, dp_mesh=mesh).data_parallel == place[1]
        with elastipod.SampleLog(tmp_path / "log", plan, generation=1, dp_mesh=mesh, writes=True) as log:
            assert log.path.name == f"gen-000001-rank-{place[0]:05d}.jsonl"


def test_one_rank_of_those_with_the_same_samples_logs_them(tmp_path: Path) -> None:
    written = []
    for rank in range(4):
        with rank_of(rank, 4):
            mesh = build_mesh(tp=2, device_type="cpu")
            plan = elastipod.ElasticBatches(16, 8)
            with elastipod.SampleLog(tmp_path, plan, generation=1, dp_mesh=mesh) as log:
                written.append(log.path.exists())
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"gen-000001-rank-0000{rank}.jsonl" for rank in (0, 1)]
    assert written[0], "the first rank of a group"


@pytest.mark.parametrize(
    ("arguments", "make_mesh", "problem"),
    [
        pytest.param({}, None, "give either rank and world_size, both among", id="neither"),
        pytest.param({"rank": 0}, None, "give either rank and world_size, both among", id="half"),
        pytest.param({"rank": 0}, lambda: build_mesh(device_type="cpu"), "or dp_mesh", id="both"),
        pytest.param({}, lambda: mesh_of(data=2, model=2), "has the dimensions data, model", id="no part"),
        pytest.param(
            {}, lambda: init_device_mesh("cpu", (2, 2)), "has the dimensions without names", id="two without names"
        ),
        pytest.param({}, lambda: mesh_of(data=2, tp=2)["tp"], "the dimensions tp", id="the wrong part"),
    ],
)
def test_a_mesh_that_does_not_say_who_trains_what_is_refused(
    arguments: dict[str, Any], make_mesh: Any, problem: str
) -> None:
    with rank_of(0, 4), pytest.raises((TypeError, BatchSizeError), match=problem):
        elastipod.ElasticBatches(16, 8).iterate(**arguments, dp_mesh=make_mesh() if make_mesh else None)


def test_a_batch_is_planned_for_a_world_or_a_mesh() -> None:
    with pytest.raises(TypeError, match="give either world_size or dp_mesh"):
        elastipod.plan_batch(8)
    with rank_of(0, 4), pytest.raises(TypeError, match="model_parallel is in dp_mesh already"):
        elastipod.plan_batch(8, dp_mesh=build_mesh(tp=2, device_type="cpu"), model_parallel=2)
