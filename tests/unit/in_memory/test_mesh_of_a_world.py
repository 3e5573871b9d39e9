"""The mesh that a sharded state has in a world: its sizes, who has which part, and what torch is asked for."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from elastipod.in_memory.mesh_plan import MeshPlan, WorldDoesNotFit
from elastipod.in_memory.parts import part_of

FSDP, HSDP = MeshPlan.of({"shard": -1}), MeshPlan.of({"replicate": -1, "shard": 4})
REPLICAS = MeshPlan.of({"replicate": 2, "shard": -1})


@pytest.mark.parametrize(
    ("plan", "world_size", "sizes", "parts"),
    [
        (FSDP, 3, (3,), [part_of(3, 0), part_of(3, 1), part_of(3, 2)]),
        (HSDP, 4, (1, 4), [part_of(4, index) for index in range(4)]),
        (HSDP, 8, (2, 4), [part_of(4, index) for index in range(4)] * 2),
        (REPLICAS, 4, (2, 2), [part_of(2, 0), part_of(2, 1)] * 2),
    ],
)
def test_ranks_are_divided_into_replicas_of_shards(
    plan: MeshPlan, world_size: int, sizes: tuple[int, ...], parts: list[int]
) -> None:
    assert plan.sizes(world_size) == sizes
    assert plan.num_shards(world_size) == sizes[-1]
    assert [plan.part(rank, world_size) for rank in range(world_size)] == parts


def test_a_world_that_cannot_be_divided_is_told_what_can() -> None:
    with pytest.raises(WorldDoesNotFit) as caught:
        HSDP.sizes(6)
    assert str(caught.value) == (
        "a world of 6 ranks cannot be divided by the mesh {'replicate': -1, 'shard': 4}; the job needs a multiple of 4: set "
        "replicaIncrementStep so that every size is one"
    )


USUAL = '{"shard": -1} (FSDP2) or {"replicate": -1, "shard": 4} (HSDP)'


@pytest.mark.parametrize(
    "dims", [{}, {"a": 2}, {"a": -1, "b": -1}, {"a": -1, "b": 0}, {"a": 1, "b": 1, "c": -1}, {"a": -1, "b": -2}]
)
def test_what_is_no_mesh_is_refused_with_two_that_are(dims: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^mesh is ") as caught:
        MeshPlan.of(dims)
    assert str(caught.value) == (
        f"mesh is {dims!r}. It must have one or two dimensions. The last one is sharded. Exactly one has size -1: {USUAL}"
    )
    assert MeshPlan.of({"a": 1, "b": -1}).dims == (("a", 1), ("b", -1)), "1 is the smallest size"


@pytest.mark.parametrize("dims", [{"shard": 2, "replicate": -1}, {"shard": -1, "other": 2}, {"replicate": -1}])
def test_a_mesh_whose_names_say_the_opposite_of_what_happens_is_refused(dims: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"^mesh is ") as caught:
        MeshPlan.of(dims)
    assert str(caught.value) == (
        f"mesh is {dims!r}, but the last dimension is the one that is sharded, whatever its name: {USUAL}"
    )


@pytest.mark.parametrize("dims", [[-1], "shard", 4, None, {1: -1}, {"shard": "4"}, {"shard": -1.0}, {"shard": True}])
def test_what_is_no_dictionary_of_sizes_is_refused_with_one_that_is(dims: Any) -> None:
    with pytest.raises(TypeError) as caught:
        MeshPlan.of(dims)
    assert str(caught.value) == f'mesh is {dims!r}; it must be a dictionary such as {{"shard": -1}}'


@pytest.mark.parametrize("has_accelerator_module", [True, False], ids=["torch 2.6", "torch 2.4"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_mesh_is_of_the_accelerator_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, device: str, has_accelerator_module: bool
) -> None:
    made: Any = mock.Mock()
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", made)
    has_one = device != "cpu"
    if has_accelerator_module:
        found = mock.Mock()
        found.is_available.return_value = has_one
        found.current_accelerator.return_value = mock.Mock(type=device) if has_one else None
        monkeypatch.setattr(torch, "accelerator", found)
    else:
        monkeypatch.delattr(torch, "accelerator")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_one)
    assert HSDP.build(8) is made.return_value
    assert made.mock_calls == [mock.call(device, (2, 4), mesh_dim_names=("replicate", "shard"))]
