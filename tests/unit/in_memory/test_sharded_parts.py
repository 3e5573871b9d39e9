"""Parts of a sharded state on one rank: described, held, checked, and sent as text."""

from __future__ import annotations

import json

import pytest
import torch

from elastipod.in_memory.members import TensorShape
from elastipod.in_memory.mesh_plan import MeshPlan, WorldDoesNotFit
from elastipod.in_memory.offers import Offer
from elastipod.in_memory.parts import PartContent, ShardedShape, part_of, parts_of
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_checks import placed_sum
from elastipod.in_memory.shard_copies import Copies, ShardCopies
from elastipod.in_memory.shard_wire import StateShapes, decode_shapes, encode_shapes
from elastipod.in_memory.state_manifest import BadManifest


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_the_sum_of_a_tensor_does_not_depend_on_how_it_is_divided_and_sees_every_change(
    dim: int, dtype: torch.dtype
) -> None:
    whole = torch.arange(24 * 6).view(24, 6).to(dtype)
    shape = ShardedShape(TensorShape("a", str(dtype).removeprefix("torch."), (24, 6)), dim)

    def total(num_shards: int, tensor: torch.Tensor) -> int:
        found = 0
        for part in parts_of(num_shards):
            rows = slice(*shape.rows(part))
            local = (tensor[rows] if dim == 0 else tensor[:, rows]).clone()
            found += placed_sum(shape.bytes_of(local), shape.stretch(part)[0], shape)
        return found % (1 << 64)

    assert len({total(num_shards, whole) for num_shards in (1, 2, 3, 4)}) == 1
    changed, swapped = whole.clone(), whole.clone()
    changed[3, 2] += 1
    swapped[[2, 7]] = whole[[7, 2]]
    assert len({total(2, tensor) for tensor in (whole, changed, swapped)}) == 3


def test_shapes_are_read_as_they_were_written() -> None:
    shapes = (
        ShardedShape(TensorShape("a", "float32", (4, 2)), 0),
        ShardedShape(TensorShape("b", "int64", ()), None),
        ShardedShape(TensorShape("c", "float32", (2,)), None, True),
    )
    told = encode_shapes(PartContent(part_of(2, 0), shapes, {}, "{}"), {"b": "00ff"})
    assert decode_shapes(told) == StateShapes(shapes, "{}", {"b": "00ff"})
    with pytest.raises(BadManifest, match="digests of tensors that it does not describe"):
        decode_shapes(told.replace('"b": "00ff"', '"a": "00ff"'))
    with pytest.raises(BadManifest, match="version 1; all ranks need the same"):
        decode_shapes(told.replace('"v": 5', '"v": 1'))


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        pytest.param(["a", "float3", [4], 0], "no type of a tensor", id="a type"),
        pytest.param(["a", "float32", [4], 1], "sharded along 1", id="a dimension"),
        pytest.param(["a", "float32", [-4], 0], "sharded along 0", id="a size"),
        pytest.param(["a", "float32"], "cannot be read", id="too few"),
    ],
)
def test_a_description_that_is_none_is_refused(tensor: list[object], said: str) -> None:
    with pytest.raises(BadManifest, match=said):
        decode_shapes(json.dumps({"v": 5, "tensors": [[*tensor, False]], "values": "{}", "uncompared": {}}))


@pytest.mark.parametrize("dims", [{}, {"shard": 2}, {"shard": 0}, {"a": -1, "b": -1}, {"a": 2, "b": 2, "c": -1}])
def test_a_mesh_that_leaves_its_size_open_is_refused(dims: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="The last one is sharded"):
        MeshPlan.of(dims)


def test_a_world_is_divided_as_the_mesh_says() -> None:
    hsdp = MeshPlan.of({"replicate": -1, "shard": 2})
    assert hsdp.sizes(6) == (3, 2)
    assert [hsdp.part(rank, 6) for rank in range(4)] == [part_of(2, 0), part_of(2, 1)] * 2
    assert MeshPlan.of({"shard": -1}).sizes(5) == (5,)
    with pytest.raises(WorldDoesNotFit, match=r"a world of 5 ranks .* a multiple of 2"):
        hsdp.sizes(5)


def test_a_rank_that_completes_its_step_alone_offers_what_it_offered_prepared() -> None:
    rank = RankState(Phase.TRAINING, 1, frozenset({7}), 4, images={3: frozenset({7, 8})}).reduced().stopped()
    before, after = rank.offer(), rank.completed_alone().offer()
    assert after.completed == 5
    assert [after.parts_at(step) for step in range(7)] == [before.parts_at(step) for step in range(7)]


def copied(steps: set[int]) -> ShardCopies:
    copies = ShardCopies(Copies(1 << 20, every=3))
    copies._complete = steps
    return copies


@pytest.mark.parametrize(
    ("complete", "images", "kept_at_commit_of_8"),
    [
        pytest.param({3}, {3}, {3}, id="until there is a newer one"),
        pytest.param({3, 6}, {3, 6}, {6}, id="not beyond that"),
        pytest.param({3}, {3, 6}, {3, 6}, id="one that not all may have ended counts for nothing"),
        pytest.param(set(), {6}, {6}, id="what was overwritten at a change, until the first copy after it"),
    ],
)
def test_images_stay_until_every_rank_has_a_newer_copy(
    complete: set[int], images: set[int], kept_at_commit_of_8: set[int]
) -> None:
    held = {step: frozenset({1}) for step in images}
    rank = RankState(Phase.PREPARED, 1, frozenset({1}), 7, is_prepared=True, images=held)
    assert set(rank.committed(copied(complete).newest(rank)).images) == kept_at_commit_of_8


def test_without_copies_images_of_a_change_go_with_the_second_step_after_it() -> None:
    rank = RankState(Phase.PREPARED, 1, frozenset({1}), 6, is_prepared=True, images={6: frozenset({1})})
    first = rank.committed(ShardCopies(None).newest(rank))
    assert set(first.images) == {6}
    assert not first.reduced().committed(ShardCopies(None).newest(first)).images


@pytest.mark.parametrize(
    "wrong", [{"memory_bytes": 0}, {"memory_bytes": 5, "every": 0}, {"memory_bytes": 5, "bytes_per_s": 0}]
)
def test_copies_of_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="leave copies out for none"):
        Copies(**wrong)


def test_offers_of_sharded_ranks_say_where_each_part_is() -> None:
    offer = Offer(frozenset({part_of(2, 1)}), 5, False, {4: parts_of(2)})
    assert offer.parts_at(5) == {part_of(2, 1)}
    assert offer.parts_at(4) == parts_of(2)
