"""How a global batch is cut: nothing lost, within memory, and refusals that name sizes which are then accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastipod.batches.batch_plan import BatchPlan, UnevenBatch, plan_batch, world_sizes
from elastipod.data import ElasticBatches
from elastipod.errors import BatchSizeError

BATCHES = st.integers(1, 300)
WORLDS = st.integers(1, 40)


@given(global_batch=BATCHES, world=WORLDS, memory=st.none() | st.integers(1, 50), groups=st.integers(1, 4))
def test_a_plan_trains_every_sample_within_the_memory(
    global_batch: int, world: int, memory: int | None, groups: int
) -> None:
    assume(world <= global_batch)
    plan = plan_batch(global_batch, world * groups, max_micro_batch=memory, model_parallel=groups)
    assert sum(plan.local_sizes) == global_batch
    assert plan.data_parallel == len(plan.local_sizes) == world
    assert max(plan.local_sizes) - min(plan.local_sizes) == (0 if plan.is_even else 1)
    assert plan.micro_batch <= (memory or global_batch)
    assert (plan.passes - 1) * (memory or global_batch) < max(plan.local_sizes) <= plan.passes * plan.micro_batch
    batch = next(ElasticBatches(global_batch, global_batch).iterate(0, world, local_sizes=plan.local_sizes))
    assert len(list(batch.micro_batches(plan.micro_batch))) == plan.passes


def test_passes_are_as_equal_as_they_can_be() -> None:
    plan = plan_batch(global_batch=40, world_size=4, max_micro_batch=8)
    assert (plan.passes, plan.micro_batch) == (2, 5), "not one pass of 8 and one of 2"


REFUSALS = [
    pytest.param({"world_size": 7, "even": True}, "cannot be shared out evenly to 7", id="uneven parts are not wanted"),
    pytest.param({"world_size": 9}, "leaves 1 of 9 data-parallel ranks without samples", id="more ranks than samples"),
    pytest.param(
        {"world_size": 6, "model_parallel": 4},
        "6 ranks cannot be cut into groups of 4",
        id="half a model-parallel group",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSALS)
def test_a_refusal_names_sizes_that_work(arguments: dict[str, int], text: str) -> None:
    with pytest.raises(BatchSizeError, match=text) as refused:
        plan_batch(8, **arguments)  # type: ignore[arg-type]
    named = re.search(r"world sizes that would work: ([\d, ]+\d)", str(refused.value))
    assert named
    for world in map(int, named[1].split(", ")):
        plan_batch(8, **{**arguments, "world_size": world})  # type: ignore[arg-type]
    for batch in re.findall(r"global batch of (\d+) or (\d+)", str(refused.value)):
        for size in map(int, batch):
            plan_batch(size, **arguments)  # type: ignore[arg-type]


@given(global_batch=st.integers(1, 60), up_to=st.integers(0, 80), even=st.booleans(), groups=st.integers(1, 4))
def test_the_sizes_that_work_are_exactly_those_that_are_accepted(
    global_batch: int, up_to: int, even: bool, groups: int
) -> None:
    accepted = []
    for world in range(1, up_to + 1):
        try:
            plan_batch(global_batch, world, even=even, model_parallel=groups)
        except BatchSizeError:
            continue
        accepted.append(world)
    assert world_sizes(global_batch, up_to, even=even, model_parallel=groups) == accepted


def block(num_small: object, small: object, large: object) -> dict[str, object]:
    return {
        "use_uneven_batch": True,
        "num_dp_groups_with_small_batch_size": num_small,
        "small_local_batch_size": small,
        "large_local_batch_size": large,
    }


@pytest.mark.parametrize(("ranks", "num_small", "small", "large"), [(24, 16, 5, 6), (48, 16, 2, 3)])
def test_the_documents_uneven_batches_are_taken(ranks: int, num_small: int, small: int, large: int) -> None:
    uneven = UnevenBatch.from_config(block(num_small, small, large))
    assert uneven is not None
    plan = plan_batch(128, ranks, uneven_batch=uneven)
    assert plan.local_sizes == (small,) * num_small + (large,) * (ranks - num_small)


@given(
    global_batch=BATCHES, ranks=WORLDS, num_small=st.integers(0, 50), small=st.integers(0, 9), large=st.integers(0, 9)
)
def test_an_uneven_batch_that_does_not_sum_up_is_refused_with_one_that_does(
    global_batch: int, ranks: int, num_small: int, small: int, large: int
) -> None:
    assume(ranks <= global_batch)
    uneven = UnevenBatch(num_small, small, large)
    if num_small <= ranks and num_small * small + (ranks - num_small) * large == global_batch:
        assert sum(uneven.local_sizes(global_batch, ranks)) == global_batch
        return
    with pytest.raises(BatchSizeError) as refused:
        uneven.local_sizes(global_batch, ranks)
    better = re.search(r"size (\d+), small_local_batch_size (\d+), large_local_batch_size (\d+)", str(refused.value))
    if better:
        assert sum(UnevenBatch(*map(int, better.groups())).local_sizes(global_batch, ranks)) == global_batch
    else:
        assert f"what would work: {global_batch // ranks} samples on each of {ranks} ranks" in str(refused.value)


@pytest.mark.parametrize("value", [None, -1, "5", True, 2.5])
def test_an_uneven_batch_with_a_bad_number_is_refused(value: object) -> None:
    with pytest.raises(BatchSizeError, match=r"uneven_batch.small_local_batch_size is .*; it must be a whole number"):
        UnevenBatch.from_config(block(1, value, 2))


def test_an_uneven_batch_that_is_off_is_none() -> None:
    with pytest.raises(BatchSizeError, match="use_uneven_batch is 'false'; it must be true or false"):
        UnevenBatch.from_config({"use_uneven_batch": "false"})
    assert UnevenBatch.from_config({}) is None
    assert UnevenBatch.from_config({"use_uneven_batch": False, "small_local_batch_size": None}) is None


@pytest.mark.parametrize("name", ["global_batch", "world_size", "max_micro_batch", "model_parallel"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(BatchSizeError, match=f"{name} is 0; it must be at least 1"):
        plan_batch(**{"global_batch": 8, "world_size": 2, name: 0})  # type: ignore[arg-type]


NEAR = "world sizes that would work: "


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"world_size": 6, "model_parallel": 4},
            f"6 ranks cannot be cut into groups of 4 (tensor x pipeline parallel); {NEAR}4, 8, 12, 16, 20, 24, 28, 32",
        ),
        (
            {"world_size": 9},
            f"a global batch of 8 leaves 1 of 9 data-parallel ranks without samples; {NEAR}1, 2, 3, 4, 5, 6, 7, 8, or a global "
            "batch of 9 and more",
        ),
        (
            {"world_size": 20, "model_parallel": 2},
            f"a global batch of 8 leaves 2 of 10 data-parallel ranks without samples; {NEAR}2, 4, 6, 8, 10, 12, 14, 16, or a "
            "global batch of 10 and more",
        ),
        (
            {"world_size": 6, "model_parallel": 2, "even": True},
            f"a global batch of 8 cannot be shared out evenly to 3 data-parallel ranks; {NEAR}2, 4, 8, 16, or a global batch of 6 "
            "or 9, or uneven parts (even=False)",
        ),
        (
            {"world_size": 2, "uneven_batch": UnevenBatch(1, 2, 5)},
            "uneven_batch gives 1 x 2 + 1 x 5 = 7 samples, but the global batch is 8; what would work: 4 samples on each of 2 ranks, "
            "without uneven_batch",
        ),
        (
            {"world_size": 3, "uneven_batch": UnevenBatch(4, 2, 5)},
            "uneven_batch.num_dp_groups_with_small_batch_size is 4, but there are 3 data-parallel ranks; what would work: "
            "num_dp_groups_with_small_batch_size 1, small_local_batch_size 2, large_local_batch_size 3",
        ),
    ],
)
def test_a_refusal_is_told_in_one_sentence(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(BatchSizeError) as refused:
        plan_batch(8, **arguments)
    assert str(refused.value) == told


def test_a_world_is_given_once() -> None:
    with pytest.raises(TypeError) as refused:
        plan_batch(8)
    assert str(refused.value) == "give either world_size or dp_mesh"
    mesh: Any = object()
    with pytest.raises(TypeError) as refused:
        plan_batch(8, 2, dp_mesh=mesh)
    assert str(refused.value) == "give either world_size or dp_mesh"
    with pytest.raises(TypeError) as refused:
        plan_batch(8, dp_mesh=mesh, model_parallel=2)
    assert str(refused.value) == "model_parallel is in dp_mesh already; leave it out"


def test_plans_and_sizes_without_options_are_uneven_and_of_whole_ranks() -> None:
    assert plan_batch(8, 3) == BatchPlan(8, 3, 3, 1, (2, 3, 3))
    assert plan_batch(8, 3, max_micro_batch=2) == BatchPlan(8, 3, 2, 2, (2, 3, 3))
    assert plan_batch(8, 3, even=True, uneven_batch=UnevenBatch(2, 2, 4)).local_sizes == (2, 2, 4)
    assert world_sizes(3, 5) == [1, 2, 3]
    assert world_sizes(4, 4, even=True) == [1, 2, 4]
    assert world_sizes(4, 8, model_parallel=2) == [2, 4, 6, 8]
    with pytest.raises(BatchSizeError, match=r"^global_batch is 0; it must be at least 1$"):
        world_sizes(0, 4)
    with pytest.raises(BatchSizeError, match=r"^model_parallel is 0; it must be at least 1$"):
        world_sizes(2, 4, model_parallel=0)
