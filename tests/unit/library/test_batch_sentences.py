"""Whole sentences of a batch that cannot be divided, the sizes at the ends, and the rate over a change of the batch."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod.batches.batch_plan import BatchPlan, UnevenBatch, plan_batch, world_sizes
from elastipod.batches.learning_rate import BatchScaledRate
from elastipod.errors import BatchSizeError

WORK = "world sizes that would work: "


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"world_size": 9},
            f"a global batch of 8 leaves 1 of 9 data-parallel ranks without samples; {WORK}1, 2, 3, 4, 5, 6, 7, 8, or a global batch of 9 "
            "and more",
        ),
        (
            {"world_size": 6, "model_parallel": 4},
            f"6 ranks cannot be cut into groups of 4 (tensor x pipeline parallel); {WORK}4, 8, 12, 16, 20, 24, 28, 32",
        ),
        (
            {"world_size": 40, "model_parallel": 4},
            "a global batch of 8 leaves 2 of 10 data-parallel ranks without samples; "
            f"{WORK}4, 8, 12, 16, 20, 24, 28, 32, or a global batch of 10 and more",
        ),
        (
            {"world_size": 5, "even": True},
            f"a global batch of 8 cannot be shared out evenly to 5 data-parallel ranks; {WORK}1, 2, 4, 8, or a global batch of 5 or 10, or "
            "uneven parts (even=False)",
        ),
        ({"world_size": 0}, "world_size is 0; it must be at least 1"),
        ({"world_size": 1, "max_micro_batch": 0}, "max_micro_batch is 0; it must be at least 1"),
    ],
)
def test_a_refusal_says_what_would_work(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(BatchSizeError) as caught:
        plan_batch(8, **arguments)
    assert str(caught.value) == said


def test_the_nearest_eight_sizes_are_named_in_their_order() -> None:
    with pytest.raises(BatchSizeError, match=f"; {WORK}24, 26, 28, 30, 32, 34, 36, 38$"):
        plan_batch(40, 31, model_parallel=2)


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        ({}, TypeError, "give either world_size or dp_mesh"),
        ({"world_size": 2, "dp_mesh": "a mesh"}, TypeError, "give either world_size or dp_mesh"),
        ({"dp_mesh": "a mesh", "model_parallel": 2}, TypeError, "model_parallel is in dp_mesh already; leave it out"),
    ],
)
def test_a_world_is_named_once(arguments: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=f"^{said}$"):
        plan_batch(8, **arguments)


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ((8, 1), BatchPlan(8, 1, 8, 1, (8,))),
        ((8, 8), BatchPlan(8, 8, 1, 1, (1,) * 8)),
        ((8, 3), BatchPlan(8, 3, 3, 1, (2, 3, 3))),
        ((8, 3, 2), BatchPlan(8, 3, 2, 2, (2, 3, 3))),
        ((8, 2, 3), BatchPlan(8, 2, 2, 2, (4, 4))),
        ((8, 2, 4), BatchPlan(8, 2, 4, 1, (4, 4))),
    ],
)
def test_a_batch_is_divided_like_this(arguments: tuple[int, ...], plan: BatchPlan) -> None:
    batch, world, *memory = arguments
    assert plan_batch(batch, world, max_micro_batch=memory[0] if memory else None) == plan
    assert plan.is_even == (world != 3)


def test_an_uneven_batch_is_no_part_that_even_refuses() -> None:
    assert plan_batch(8, 3, even=True, uneven_batch=UnevenBatch(1, 2, 3)).local_sizes == (2, 3, 3)


@pytest.mark.parametrize(
    ("block", "batch", "ranks", "said"),
    [
        (
            UnevenBatch(5, 1, 2), 8, 3,
            "uneven_batch.num_dp_groups_with_small_batch_size is 5, but there are 3 data-parallel ranks; what would work: "
            "num_dp_groups_with_small_batch_size 1, small_local_batch_size 2, large_local_batch_size 3",
        ),
        (
            UnevenBatch(1, 1, 2), 8, 3,
            "uneven_batch gives 1 x 1 + 2 x 2 = 5 samples, but the global batch is 8; what would work: "
            "num_dp_groups_with_small_batch_size 1, small_local_batch_size 2, large_local_batch_size 3",
        ),
        (
            UnevenBatch(1, 1, 2), 8, 4,
            "uneven_batch gives 1 x 1 + 3 x 2 = 7 samples, but the global batch is 8; what would work: 2 samples on each of 4 ranks, "
            "without uneven_batch",
        ),
    ],
)  # fmt: skip
def test_uneven_parts_that_are_not_the_batch_are_answered_with_ones_that_are(
    block: UnevenBatch, batch: int, ranks: int, said: str
) -> None:
    with pytest.raises(BatchSizeError) as caught:
        block.local_sizes(batch, ranks)
    assert str(caught.value) == said
    assert UnevenBatch(3, 2, 9).local_sizes(6, 3) == (2, 2, 2), "as many small ones as there are ranks"


def test_sizes_for_a_job_are_whole_groups_up_to_the_largest() -> None:
    assert world_sizes(4, 100) == [1, 2, 3, 4]
    assert world_sizes(4, 3) == [1, 2, 3]
    assert world_sizes(4, 0) == []
    assert world_sizes(4, 100, even=True) == [1, 2, 4]
    assert world_sizes(4, 11, model_parallel=3) == [3, 6, 9]
    assert world_sizes(4, 12, even=True, model_parallel=3) == [3, 6, 12]
    with pytest.raises(BatchSizeError, match=r"^global_batch is 0; it must be at least 1$"):
        world_sizes(0, 4)
    with pytest.raises(BatchSizeError, match=r"^model_parallel is 0; it must be at least 1$"):
        world_sizes(4, 4, model_parallel=0)


def test_a_rate_follows_the_batch_over_a_ramp_that_begins_where_it_is() -> None:
    rate = BatchScaledRate("linear", 8, warm_up_steps=4)
    assert rate.state_dict() == {"v": 1, "since": 0, "from": 1.0, "to": 1.0, "global_batch": None}
    rate.resized(10, 16)
    assert [rate.factor(step) for step in (0, 10, 14)] == [2.0] * 3, "the first batch has no ramp"
    rate.resized(20, 16)
    assert rate.factor(21) == 2.0
    rate.resized(20, 48)
    assert [rate.factor(step) for step in (19, 20, 21, 23, 24, 99)] == [2.0, 2.0, 3.0, 5.0, 6.0, 6.0]
    rate.resized(22, 8)
    assert rate.state_dict() == {"v": 1, "since": 22, "from": 4.0, "to": 1.0, "global_batch": 8}
    assert [rate.factor(step) for step in (22, 24, 26)] == [4.0, 2.5, 1.0]
    other = BatchScaledRate("linear", 8, warm_up_steps=4)
    other.load_state_dict(rate.state_dict())
    assert other.state_dict() == rate.state_dict()
    at_once = BatchScaledRate("square-root", 4)
    at_once.resized(1, 16)
    at_once.resized(2, 64)
    assert at_once.factor(2) == 4.0
