"""What a load plan makes of live tensors: where their bytes lie in a chunk, what may go there unchanged, and what does not fit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from elastipod.checkpoint.chunk import Chunk
from elastipod.checkpoint.load_plan import LoadPlan, LoadTarget


def chunk(*sizes: int, dtype: str = "float32", item: int = 4) -> Chunk:
    return Chunk("w", ("w",), dtype, sizes, (0,) * len(sizes), sizes, item * math.prod(sizes))


def target(starts: tuple[int, ...], tensor: torch.Tensor) -> LoadTarget:
    return LoadTarget(starts, tuple(tensor.shape), tensor)


@pytest.mark.parametrize(
    ("starts", "lengths", "of", "found"),
    [
        ((), (), chunk(), (0, 4)),
        ((2, 1), (3, 2), chunk(6, 5), (40, 100)),
        ((0, 0), (6, 5), chunk(6, 5), (0, 120)),
        ((5,), (1,), chunk(6), (20, 24)),
        ((0, 0), (0, 5), chunk(0, 5), (0, 0)),
        ((1, 0), (2, 0), chunk(6, 0), (0, 0)),
    ],
)
def test_a_target_lies_in_whole_rows_of_its_chunk(
    starts: tuple[int, ...], lengths: tuple[int, ...], of: Chunk, found: tuple[int, int]
) -> None:
    assert LoadTarget(starts, lengths, torch.zeros(lengths)).byte_range(of) == found


def test_bytes_go_straight_into_a_tensor_that_holds_them_as_they_are() -> None:
    room = torch.zeros(32)
    whole = room[4:16].reshape(4, 3)
    view = target((2, 0), whole).direct_view(chunk(8, 3))
    assert view is not None
    assert (view.dtype, view.shape, view.data_ptr()) == (torch.uint8, (48,), whole.data_ptr())
    view[:4] = torch.tensor([1.5]).view(torch.uint8)
    assert room[4] == 1.5
    single = torch.zeros(9)[::3][1:2].as_strided((1,), (5,))
    assert target((0,), single).direct_view(chunk(1)) is None, "it lies at an odd word"
    at_start = torch.zeros(9).as_strided((1,), (5,))
    found = target((0,), at_start).direct_view(chunk(1))
    assert found is not None
    assert found.shape == (4,)


@pytest.mark.parametrize(
    ("starts", "tensor", "of"),
    [
        pytest.param((0, 0), torch.zeros(4, 2), chunk(8, 3), id="a part of each row"),
        pytest.param((0,), torch.zeros(4, dtype=torch.float64), chunk(8), id="another type"),
        pytest.param((0,), torch.zeros(8)[::2], chunk(8), id="not contiguous"),
        pytest.param((0,), torch.zeros(8, device="meta"), chunk(8), id="another device"),
        pytest.param((1,), torch.zeros(4), chunk(8), id="from the middle of a word to its beginning"),
        pytest.param((0,), torch.zeros(9)[1:5], chunk(8), id="from the beginning of a word to its middle"),
    ],
)
def test_other_tensors_need_a_copy(starts: tuple[int, ...], tensor: torch.Tensor, of: Chunk) -> None:
    assert target(starts, tensor).direct_view(of) is None


def test_words_are_as_aligned_in_the_tensor_as_in_the_chunk() -> None:
    assert target((1,), torch.zeros(9)[1:5]).direct_view(chunk(8)) is not None
    assert target((2,), torch.zeros(9)[4:6]).direct_view(chunk(8)) is not None
    assert target((1,), torch.zeros(9)[2:4]).direct_view(chunk(8)) is None


def test_a_target_is_filled_from_a_chunk_or_from_the_bytes_of_its_rows() -> None:
    content = torch.arange(24.0).reshape(6, 4)
    wanted = content[2:5, 1:3]
    first, second = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.float64)
    target((2, 1), first).fill(content)
    target((2, 1), second).fill_from_bytes(content[2:5].contiguous().view(torch.uint8).reshape(-1), chunk(6, 4))
    assert torch.equal(first, wanted)
    assert torch.equal(second, wanted.double())
    number = torch.zeros(())
    LoadTarget((), (), number).fill_from_bytes(torch.tensor(2.5).reshape(1).view(torch.uint8), chunk())
    assert number == 2.5


# -- plans -------------------------------------------------------------------------------------------------------------


class Saved:
    """A saved state: tensors of one chunk each, by key, and values."""

    def __init__(self, tensors: dict[str, tuple[int, ...]], values: dict[str, Any]) -> None:
        entries: dict[str, Any] = {
            key: TensorStorageMetadata(
                TensorProperties(dtype=torch.float32),
                torch.Size(shape),
                [ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))],
            )
            for key, shape in tensors.items()
        }
        self.metadata = Metadata({**entries, **{key: BytesStorageMetadata() for key in values}})
        self._values = values

    def value(self, key: str) -> Any:
        return self._values[key]


def nested(**more: Any) -> dict[str, Any]:
    return {"model": {"w": torch.zeros(2, 3), **more}}


OPTIMIZER = {"optimizer": {"state": {}, "param_groups": {"0": {"lr": 1.0}}}}


@pytest.mark.parametrize(
    ("live", "saved", "told"),
    [
        pytest.param(nested(b=torch.zeros(1)), {"model.w": (2, 3)}, "it has no model.b", id="too little"),
        pytest.param(
            nested(), {"model.w": (2, 3), "model.c": (1,)}, "it also has model.c, which this model has not", id="too much"
        ),
        pytest.param(
            {**nested(), **OPTIMIZER}, {"model.w": (2, 3), "optimizer.state.w.m": (1,)},
            "it also has optimizer.state.w.m, which this model and optimizer have not", id="too much of an optimizer",
        ),
        pytest.param(
            nested(), {"model.w": (3, 2)}, "its model.w has the shape [3, 2], here it is [2, 3]", id="another shape"
        ),
        pytest.param(nested(b=torch.zeros(1)), {"model.w": (2, 3), "model.b": None}, "its model.b is no tensor", id="no tensor"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(live: Any, saved: dict[str, Any], told: str) -> None:
    tensors = {key: shape for key, shape in saved.items() if shape is not None}
    source = Saved(tensors, {key: 1 for key, shape in saved.items() if shape is None})
    with pytest.raises(ValueError, match="model") as raised:
        LoadPlan(live, source)
    assert str(raised.value) == told


def test_what_is_asked_for_by_name_may_be_there_or_not() -> None:
    own = {"random.0": "x", "random.7": "x", "scheduler": "x", "scheduler.a": "x", "stateful.a.values": "x"}
    options = {"optimizer.param_groups.0.lr": 1, "optimizer.param_groups.0.foreach": 1}
    weights: dict[str, tuple[int, ...]] = {"model.w": (2, 3)}
    found = LoadPlan(nested(), Saved({**weights, "optimizer.state.w.m": (1,)}, {**own, **options}))
    assert (found.missing, found.unexpected) == ((), ())
    found = LoadPlan({**nested(), **OPTIMIZER}, Saved(weights, own))
    assert (found.missing, found.unexpected) == ((), ())


def test_a_load_in_part_lists_what_only_one_side_has() -> None:
    saved = Saved({"model.w": (2, 3), "model.c": (1,), "model.d": (1,)}, {})
    live = nested(a=torch.zeros(1), b=torch.zeros(1))
    found = LoadPlan(live, saved, strict=False, elsewhere=["model.d"])
    assert (found.missing, found.unexpected) == (("model.a", "model.b"), ("model.c",))
    assert {index: [(each.starts, each.lengths) for each in targets] for index, targets in found.targets().items()} == {
        ("model.w", (0, 0)): [((0, 0), (2, 3))]
    }
    LoadPlan(nested(), Saved({"model.w": (2, 3), "model.d": (1,)}, {}), elsewhere=["model.d"])


def test_targets_are_the_live_tensors_and_values_are_replaced() -> None:
    live = {"model": {"w": torch.nn.Parameter(torch.zeros(2, 3)), "deep": {"n": 1}, "list": [1, 2]}}
    source = Saved({"model.w": (2, 3)}, {"model.deep.n": 5, "model.list.0": 6, "model.list.1": 7, "model.list": [6, 7]})
    found = LoadPlan(live, source, strict=False)
    ((index, (only,)),) = found.targets().items()
    assert index == ("model.w", (0, 0))
    assert (only.tensor.data_ptr(), only.tensor.requires_grad) == (live["model"]["w"].data_ptr(), False)  # type: ignore[attr-defined]
    found.copy_values()
    assert live["model"]["deep"] == {"n": 5}
    assert live["model"]["list"] == [6, 7]
