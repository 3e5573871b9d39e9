"""What a mesh for training is made of, what its refusals say whole, and where a rank stands in one."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from elastipod.errors import BatchSizeError
from elastipod.mesh import build_mesh, data_parallel, logs_samples, place_of, reads_data
from elastipod.parallelism import Parallelism
from elastipod.rank_in_world import RankInWorld


class Mesh:
    """A mesh of named dimensions, at some coordinate."""

    def __init__(self, at: tuple[int, ...] | None, **dims: int) -> None:
        self.mesh_dim_names: tuple[str, ...] | None = tuple(dims)
        self.shape, self.ndim, self._at = tuple(dims.values()), len(dims), at

    def size(self, dim: int | None = None) -> int:
        if dim is not None:
            return self.shape[dim]
        whole = 1
        for size in self.shape:
            whole *= size
        return whole

    def get_local_rank(self, name: str) -> int:
        assert self.mesh_dim_names is not None
        assert self._at is not None
        return self._at[self.mesh_dim_names.index(name)]

    def get_coordinate(self) -> tuple[int, ...] | None:
        return self._at


def mesh(at: tuple[int, ...] | None, **dims: int) -> Any:
    return Mesh(at, **dims)


def unnamed(at: int, size: int) -> Any:
    found = Mesh((at,), any=size)
    found.mesh_dim_names = None
    return found


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Be in a world of 48 ranks; the calls tell which mesh is made."""
    played = mock.Mock()
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", played)
    monkeypatch.setattr("elastipod.torch_compat.accelerator_type", lambda: "the machine's")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 48)
    return played


@pytest.mark.parametrize(
    ("axes", "device", "dims"),
    [
        ({}, "the machine's", {"dp": 48}),
        ({"tp": 48}, "the machine's", {"dp": 1, "tp": 48}),
        ({"tp": 2, "pp": 3, "cp": 4}, "the machine's", {"pp": 3, "dp": 2, "cp": 4, "tp": 2}),
        ({"shard": 8, "device_type": "cpu"}, "cpu", {"dp": 6, "shard": 8}),
        ({"tp": 4, "heads": 8, "kv_heads": 2}, "the machine's", {"dp": 12, "tp": 4}),
    ],
)
def test_a_mesh_has_the_axes_that_are_more_than_one_and_the_data_parallel_one(
    made: Any, axes: dict[str, Any], device: str, dims: dict[str, int]
) -> None:
    assert build_mesh(**axes) is made.return_value
    assert made.mock_calls == [mock.call(device, tuple(dims.values()), mesh_dim_names=tuple(dims))]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (
            {"tp": 5},
            "48 ranks form no whole model groups of 5 (tensor 5); world sizes that fit: 35, 40, 45, 50, 55, 60. "
            "spec.elastipod.parallelism: 5 keeps the job to such sizes",
        ),
        (
            {"tp": 8, "pp": 2, "cp": 3, "shard": 4},
            "48 ranks form no whole model groups of 192 (tensor 8 x pipeline 2 x context 3 x shard 4); world sizes that fit: 192, 384, "
            "576, 768, 960, 1152. spec.elastipod.parallelism: 192 keeps the job to such sizes",
        ),
        ({"tp": 0}, "tensor is 0; it must be a whole number of at least 1"),
        ({"pp": True}, "pipeline is True; it must be a whole number of at least 1"),
        ({"cp": 1.0}, "context is 1.0; it must be a whole number of at least 1"),
        (
            {"tp": 3, "heads": 8},
            "tensor parallelism of 3 does not divide 8 heads and 8 key/value heads (times a replication); sizes that fit: 1, 2, 4, 8",
        ),
        (
            {"tp": 3, "kv_heads": 4},
            "tensor parallelism of 3 does not divide 4 heads and 4 key/value heads (times a replication); sizes that fit: 1, 2, 4",
        ),
        (
            {"tp": 6, "heads": 12, "kv_heads": 4},
            "tensor parallelism of 6 does not divide 12 heads and 4 key/value heads (times a replication); sizes that fit: 1, 2, 4, 12",
        ),
        ({"heads": 8, "kv_heads": 3}, "8 heads cannot share 3 key/value heads; the second must divide the first"),
        ({"heads": 0}, "0 heads cannot share 0 key/value heads; the second must divide the first"),
    ],
)
def test_what_forms_no_mesh_is_refused_with_sizes_that_do(made: Any, axes: dict[str, Any], said: str) -> None:
    with pytest.raises(BatchSizeError) as caught:
        build_mesh(**axes)
    assert str(caught.value) == said
    assert made.mock_calls == []


def test_a_mesh_spans_a_process_group(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError) as caught:
        build_mesh()
    assert (
        str(caught.value)
        == "a mesh spans the ranks of a process group; call torch.distributed.init_process_group first"
    )


def test_the_ranks_of_a_job_divide_into_groups() -> None:
    axes = Parallelism(2, 3, 4, 5)
    assert (axes.model_group, axes.groups(240), axes.data_parallel(240)) == (120, 2, 10)
    assert Parallelism() == Parallelism(1, 1, 1, 1)
    replications = [Parallelism(tensor).check_heads(8, 2) for tensor in (1, 2, 4, 8)]
    assert replications == [1, 1, 2, 4]
    assert Parallelism(8).check_heads(8) == 1


@pytest.mark.parametrize(
    ("of", "rank", "size"),
    [
        (mesh((3,), dp=4), 3, 4),
        (mesh((1, 2, 1, 0), pp=2, dp=3, cp=2, tp=4), 2, 3),
        (mesh((2, 3), dp=3, shard=5), 13, 15),
        (mesh((1, 0, 1), dp=2, shard=4, tp=2), 4, 8),
    ],
)
def test_ranks_that_train_other_samples_are_those_of_dp_and_shard(of: Any, rank: int, size: int) -> None:
    assert data_parallel(of) == RankInWorld(rank, size)
    assert place_of(None, None, of, [1, 2]) == RankInWorld(rank, size, (1, 2))


@pytest.mark.parametrize(
    ("of", "rank", "size"),
    [
        (unnamed(2, 3), 2, 3),
        (mesh((3,), replicate=4), 3, 4),
        (mesh((1, 2), dp_replicate=2, dp_shard=3), 5, 6),
    ],
)
def test_a_part_of_a_mesh_may_be_all_data_parallel(of: Any, rank: int, size: int) -> None:
    assert place_of(None, None, of) == RankInWorld(rank, size)


@pytest.mark.parametrize(
    ("of", "named"),
    [(mesh((0,), tp=2), "tp"), (mesh((0, 0), a=2, b=2), "a, b"), (mesh((0, 0), dp_a=2, tp=2), "dp_a, tp")],
)
def test_a_mesh_that_does_not_say_who_trains_what_is_refused(of: Any, named: str) -> None:
    with pytest.raises(BatchSizeError) as caught:
        place_of(None, None, of)
    assert str(caught.value) == (
        f'dp_mesh has the dimensions {named}, and none is named dp; give its data-parallel part, such as mesh["dp"]'
    )
    with pytest.raises(BatchSizeError, match=f"^the mesh has the dimensions {named}, and none is named dp$"):
        data_parallel(of)


def test_a_rank_outside_of_the_mesh_is_told_so() -> None:
    with pytest.raises(
        BatchSizeError, match=r"^this rank is not in dp_mesh; give each rank the mesh that it belongs to$"
    ):
        place_of(None, None, mesh(None, dp_a=2))


@pytest.mark.parametrize(
    "given",
    [(0, 2, mesh((0,), dp=2)), (0, None, mesh((0,), dp=2)), (0, None, None), (None, 2, None), (None, None, None)],
)
def test_a_place_is_named_in_one_way(given: tuple[Any, Any, Any]) -> None:
    with pytest.raises(
        TypeError, match=r"^give either rank and world_size, both among the data-parallel ranks, or dp_mesh$"
    ):
        place_of(*given)
    assert place_of(1, 2, None, [3, 4]) == RankInWorld(1, 2, (3, 4))
    assert place_of(1, 2, None) == RankInWorld(1, 2)


def test_one_of_the_ranks_with_the_same_samples_reads_and_logs_them() -> None:
    reading = [reads_data(mesh((pp, 1, 1, tp), pp=2, dp=2, shard=2, tp=2)) for pp in range(2) for tp in range(2)]
    assert reading == [True, False, False, False]
    assert logs_samples(None) is True
    assert logs_samples(mesh((1,), replicate=2)) is True, "the mesh does not tell"
    assert logs_samples(unnamed(1, 2)) is True
    assert [logs_samples(mesh((1, tp), dp=2, tp=2)) for tp in range(2)] == [True, False]
