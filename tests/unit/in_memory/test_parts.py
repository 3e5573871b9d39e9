"""Parts of sharded tensors: their shapes and bytes, what a live tensor is, and room for a part that another world divided."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from elastipod.in_memory.members import Content, TensorShape
from elastipod.in_memory.parts import (
    ShardedShape,
    UnknownSharding,
    local_of,
    part_content,
    part_of,
    parts_of,
    place_of,
    room_for,
    shape_of,
)

BY_ROWS = ShardedShape(TensorShape("a", "float32", (5, 3)), 0)
BY_COLUMNS = ShardedShape(TensorShape("b", "int16", (2, 5)), 1)
WHOLE = ShardedShape(TensorShape("c", "float64", (4,)), None)


def test_a_part_tells_its_layout_and_place() -> None:
    assert [place_of(part_of(3, index)) for index in range(3)] == [(3, 0), (3, 1), (3, 2)]
    assert parts_of(3) == {part_of(3, 0), part_of(3, 1), part_of(3, 2)}
    assert place_of(0) == (0, 0), "replicated state is no part of a layout"
    assert place_of(part_of(1, (1 << 20) - 1)) == (1, (1 << 20) - 1)


@pytest.mark.parametrize(
    ("shape", "index", "sizes", "stretch"),
    [
        (BY_ROWS, 0, (2, 3), (0, 24)),
        (BY_ROWS, 1, (2, 3), (24, 48)),
        (BY_ROWS, 2, (1, 3), (48, 60)),
        (BY_ROWS, 3, (0, 3), (60, 60)),
        (BY_COLUMNS, 0, (2, 2), (0, 8)),
        (BY_COLUMNS, 2, (2, 1), (16, 20)),
        (WHOLE, 1, (4,), (0, 32)),
    ],
)
def test_the_shape_and_the_bytes_of_a_part(
    shape: ShardedShape, index: int, sizes: tuple[int, ...], stretch: tuple[int, int]
) -> None:
    part = part_of(4 if index == 3 else 3, index)
    assert (shape.local_sizes(part), shape.stretch(part)) == (sizes, stretch)
    if shape.dim is not None:
        start, stop = shape.rows(part)
        assert stop - start == sizes[shape.dim]


def test_a_tensor_without_elements_has_no_bytes_anywhere() -> None:
    nothing = ShardedShape(TensorShape("a", "float32", (0, 3)), 0)
    assert [nothing.stretch(part_of(2, index)) for index in range(2)] == [(0, 0), (0, 0)]


def test_the_bytes_of_a_part_lie_in_the_order_of_the_divided_dimension_and_are_put_back() -> None:
    """Those of rows are the tensor's own memory, those of columns are not."""
    rows, columns = torch.arange(6.0).reshape(2, 3), torch.arange(4, dtype=torch.int16).reshape(2, 2)
    assert BY_ROWS.bytes_of(rows).data_ptr() == rows.data_ptr()
    raw = BY_COLUMNS.bytes_of(columns)
    assert raw.view(torch.int16).tolist() == [0, 2, 1, 3]
    BY_COLUMNS.put_bytes(columns, raw.view(torch.int16).add(10).view(torch.uint8))
    assert columns.tolist() == [[10, 11], [12, 13]]
    BY_ROWS.put_bytes(rows, torch.full((6,), 7.0).view(torch.uint8))
    assert rows.tolist() == [[7.0] * 3] * 2
    BY_ROWS.put_bytes(torch.empty(0, 3), torch.empty(0, dtype=torch.uint8))


class Placed:
    """What `shape_of` looks at of a tensor that is divided."""

    dtype, shape = torch.bfloat16, torch.Size((8, 2))

    def __init__(self, *placements: Any) -> None:
        self.placements = placements


def test_what_a_live_tensor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shape_of("x", torch.zeros(3, 4)) == ShardedShape(TensorShape("x", "float32", (3, 4)), None)
    monkeypatch.setattr("elastipod.in_memory.parts.DTensor", Placed)
    for placements in ((Shard(1),), (Replicate(), Shard(1))):
        placed: Any = Placed(*placements)
        assert shape_of("x", placed) == ShardedShape(TensorShape("x", "bfloat16", (8, 2)), 1)
    for whole in ((Replicate(),), (Replicate(), Replicate())):
        on_mesh: Any = Placed(*whole)
        assert shape_of("x", on_mesh) == ShardedShape(TensorShape("x", "bfloat16", (8, 2)), None, True)
    for placements in ((Partial(),), (Shard(0), Shard(1)), (Shard(0), Replicate())):  # type: ignore[assignment]
        placed = Placed(*placements)
        with pytest.raises(UnknownSharding, match=r"x is placed as .*whole on every rank or divided as by fully_shard"):
            shape_of("x", placed)


class Divided(torch.Tensor):
    """A tensor divided by rows in place of a DTensor, which takes seconds to load. made: what it was made of."""

    made: dict[str, Any]

    @property
    def placements(self) -> tuple[Any, ...]:
        return (Shard(0),)

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)

    @classmethod
    def make(cls, local: torch.Tensor, mesh: Any, placements: Any, sizes: torch.Size) -> Divided:
        found = local.as_subclass(cls)
        found.made = {"mesh": mesh, "placements": placements, "sizes": sizes}
        return found


class Live:
    """Members whose model has one tensor, which is divided; their optimizer has not run."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 5)
        self.weight = torch.arange(15.0).reshape(5, 3).as_subclass(Divided)

    def content(self) -> Content:
        return Content({"model.weight": self.weight}, "the values")


WEIGHT = ShardedShape(TensorShape("model.weight", "float32", (5, 3)), 0)
MOMENT = ShardedShape(TensorShape("optimizer.exp_avg", "float32", (5, 3)), 0)
COUNTER = ShardedShape(TensorShape("optimizer.step", "float32", ()), None)
OWN = ShardedShape(TensorShape("optimizer.own", "int64", (7,)), None)


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("elastipod.in_memory.parts.DTensor", Divided)
    monkeypatch.setattr("elastipod.in_memory.parts.sharded_tensor", Divided.make)
    return Live()


def test_a_part_of_what_lives_is_its_own_memory(live: Any) -> None:
    beats: list[str] = []
    found = part_content(live, part_of(1, 0), lambda: beats.append("one"))
    assert len(beats) == len(found.tensors) == 1
    assert (found.part, found.shapes, found.values) == (part_of(1, 0), (WEIGHT,), "the values")
    assert type(found.tensors["model.weight"]) is torch.Tensor
    assert found.tensors["model.weight"].data_ptr() == live.weight.data_ptr()
    assert found.num_bytes == 60
    assert local_of(torch.ones(2, requires_grad=True)).requires_grad is False


@pytest.mark.parametrize("dims", [1, 2])
def test_there_is_room_for_what_an_optimizer_does_not_have_yet(live: Any, dims: int) -> None:
    mesh = SimpleNamespace(ndim=dims)
    found = room_for((WEIGHT, MOMENT, COUNTER, OWN), part_of(2, 1), live, mesh)
    assert found.values == ""
    assert found.tensors["model.weight"] is live.weight
    made: Any = found.tensors["optimizer.exp_avg"]
    assert (made.to_local().shape, made.dtype) == ((2, 3), torch.float32)
    placements = [*(Replicate() for _ in range(dims - 1)), Shard(0)]
    assert made.made == {"mesh": mesh, "placements": placements, "sizes": (5, 3)}
    factor = ShardedShape(TensorShape("optimizer.factor", "float32", (5, 1)), None, True)
    on_mesh: Any = room_for((factor,), part_of(2, 1), live, mesh).tensors[factor.key]
    assert on_mesh.made == {"mesh": mesh, "placements": [Replicate()] * dims, "sizes": (5, 1)}
    others = [found.tensors[shape.key] for shape in (COUNTER, OWN)]
    assert [(type(each), each.shape, each.dtype) for each in others] == [
        (torch.Tensor, (), torch.float32), (torch.Tensor, (7,), torch.int64),
    ]  # fmt: skip


def test_counters_stay_on_the_host_and_all_else_lies_with_the_model(live: Any) -> None:
    live.model = nn.Linear(3, 5, device="meta")
    found = room_for((COUNTER, OWN, MOMENT), part_of(2, 0), live, SimpleNamespace(ndim=1))
    assert [each.device.type for each in found.tensors.values()] == ["cpu", "meta", "meta"]


def test_a_weight_that_this_world_divides_otherwise_is_refused_and_an_optimizers_own_is_made_anew(live: Any) -> None:
    other = replace(WEIGHT, dim=1)
    with pytest.raises(
        UnknownSharding,
        match=r"model.weight was float32 of \(5, 3\), divided along dimension 1 in the former world, and is .*along dimension 0 now",
    ):
        room_for((other,), part_of(2, 0), live, SimpleNamespace(ndim=1))
    live.content = lambda: Content({"optimizer.exp_avg": live.weight}, "")
    mine = replace(MOMENT, whole=replace(MOMENT.whole, dtype="float64"))
    found = room_for((mine,), part_of(2, 0), live, SimpleNamespace(ndim=1))
    assert found.tensors["optimizer.exp_avg"].dtype == torch.float64
