"""Which samples each rank trains on: once each, whatever happens to the world."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.nonempty import every
from torch._C._distributed_c10d import HashStore

from elastipod.data import BatchSplit, ElasticBatches, even_part
from elastipod.data.plan_check import check_in_store
from elastipod.errors import DataError
from elastipod.shuffle import Shuffle

SIZES = st.integers(1, 400)
WORLDS = st.integers(1, 9)


@given(size=st.integers(0, 1000), world_size=st.integers(1, 64))
def test_shares_cover_once_in_order_and_differ_by_one_at_most(size: int, world_size: int) -> None:
    shares = [even_part(size, rank, world_size) for rank in range(world_size)]
    assert [index for part in shares for index in part] == list(range(size))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is outside a world of 4"):
        even_part(16, rank, 4)


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 1000))
def test_a_shuffle_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = Shuffle(size, seed, epoch)
    assert sorted(order[position] for position in range(size)) == list(range(size))


@given(
    size=st.one_of(st.integers(1, 3000), st.integers(1, 2**62 + 9)), seed=st.integers(-(2**40), 2**70), data=st.data()
)
def test_many_positions_at_once_are_the_same_indices(size: int, seed: int, data: st.DataObject) -> None:
    first, step = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size))
    order, positions = Shuffle(size, seed, 3), [(first + number * step) % size for number in range(300)]
    assert order.take(positions) == [order[position] for position in positions]
    assert order.take([]) == []
    for outside in (-1, size):
        with pytest.raises(IndexError, match="position"):
            order.take([*positions, outside])


GOLDEN_SMALL = [1, 0, 9, 4, 7, 8, 6, 5, 3, 2]
GOLDEN_LARGE = [675662775318, 555991999733, 343256575255]


def test_the_order_is_the_documented_one_for_ever() -> None:
    """A change here moves every running job's place in its data: it needs a new method number, never new values."""
    assert [Shuffle(10, 0, 0)[position] for position in range(10)] == GOLDEN_SMALL
    assert [Shuffle(10**12, 7, 3)[position] for position in range(3)] == GOLDEN_LARGE


def test_epochs_and_seeds_give_other_orders() -> None:
    orders = {
        tuple(Shuffle(100, seed, epoch)[position] for position in range(100)) for seed in (0, 1) for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_a_shuffle_spreads_neighbours() -> None:
    """Of 4096 neighbours about one in 2048 should stay next to each other; a network with too few rounds leaves many."""
    order = Shuffle(4096, 1, 0)
    indices = [order[position] for position in range(4096)]
    assert sum(abs(first - second) == 1 for first, second in pairwise(indices)) < 12
    halves = sum(index >= 2048 for index in indices[:2048])
    assert 1024 - 160 < halves < 1024 + 160


@given(data=st.data(), dataset_size=SIZES, global_batch=st.integers(1, 64), epochs=st.integers(1, 3))
def test_every_sample_once_per_epoch_through_any_resizes(
    data: st.DataObject, dataset_size: int, global_batch: int, epochs: int
) -> None:
    plan = ElasticBatches(dataset_size, global_batch, seed=data.draw(st.integers(0, 99)), epochs=epochs)
    seen: Counter[tuple[int, int]] = Counter()
    step = 0
    while step < plan.total_steps:
        world_size = data.draw(WORLDS)
        stay = data.draw(st.integers(1, plan.total_steps))
        ranks = [plan.iterate(rank, world_size, start_step=step) for rank in range(world_size)]
        for _ in range(min(stay, plan.total_steps - step)):
            step += 1
            parts = [next(batches) for batches in ranks]
            assert {part.step for part in parts} == {step}
            assert sum(len(part.indices) for part in parts) == parts[0].global_size <= global_batch
            seen.update((part.epoch, index) for part in parts for index in part.indices)
            assert parts[0].samples_seen == seen.total()
    assert seen == Counter({(epoch, index): 1 for epoch in range(epochs) for index in range(dataset_size)})


@given(step=st.integers(1, 30), world_size=WORLDS)
def test_the_global_batch_of_a_step_does_not_depend_on_the_world(step: int, world_size: int) -> None:
    plan = ElasticBatches(dataset_size=95, global_batch=10, seed=3, epochs=3)
    whole = plan.batch(step, 0, 1)
    parts = [plan.batch(step, rank, world_size) for rank in range(world_size)]
    assert tuple(index for part in parts for index in part.indices) == whole.indices


@given(global_size=st.integers(1, 50), world_size=WORLDS, micro_size=st.integers(1, 12))
def test_passes_are_equally_many_on_every_rank_and_weigh_as_one_process(
    global_size: int, world_size: int, micro_size: int
) -> None:
    plan = ElasticBatches(dataset_size=global_size, global_batch=global_size)
    passes = [list(plan.batch(1, rank, world_size).micro_batches(micro_size)) for rank in range(world_size)]
    assert len({len(each) for each in passes}) == 1
    assert every([part.is_last for part in each] == [False] * (len(each) - 1) + [True] for each in passes)
    parts = [part for each in passes for part in each]
    assert every(1 <= len(part.indices) <= micro_size for part in parts)
    real = [part for part in parts if part.weight]
    assert sorted(index for part in real for index in part.indices) == list(range(global_size))
    for part in real:  # mean over the pass x weight / world = the pass's part of the global mean
        assert part.weight / world_size == pytest.approx(len(part.indices) / global_size, rel=1e-12)


def test_a_rank_without_samples_takes_part_with_weight_zero() -> None:
    batch = ElasticBatches(dataset_size=2, global_batch=2, shuffle=False).batch(1, rank=0, world_size=4)
    assert batch.indices == ()
    assert batch.weight == 0
    assert batch.indices_or_spare == (0,)
    for size in (4, None):
        (only,) = batch.micro_batches(size)
        assert (len(only.indices), only.weight, only.is_last) == (1, 0.0, True)


@given(global_size=st.integers(1, 50), world_size=WORLDS, micro_size=st.none() | st.integers(1, 12))
def test_rows_cut_what_was_loaded_for_the_whole_batch(
    global_size: int, world_size: int, micro_size: int | None
) -> None:
    for rank in range(world_size):
        batch = ElasticBatches(dataset_size=50, global_batch=global_size).batch(1, rank, world_size)
        passes = list(batch.micro_batches(micro_size))
        assert len(passes) == batch.num_passes(micro_size)
        assert every(tuple(batch.indices_or_spare[part.rows]) == tuple(part.indices) for part in passes)
        assert sum(part.weight for part in passes) == pytest.approx(batch.weight, rel=1e-12)


@given(
    size=st.integers(1, 9000),
    global_batch=st.integers(1, 700),
    world_size=st.integers(1, 4),
    start=st.integers(0, 60),
    seed=st.integers(0, 2**64),
)
def test_looking_ahead_changes_no_batch(size: int, global_batch: int, world_size: int, start: int, seed: int) -> None:
    """Epochs of some thousand samples are looked up in pieces, which end anywhere."""
    plan = ElasticBatches(size, global_batch, seed=seed, epochs=2)
    steps = range(min(start, plan.total_steps - 1) + 1, plan.total_steps + 1)
    rank = start % world_size
    batches = plan.iterate(rank, world_size, start_step=steps[0] - 1)
    looked_at = {0, 1, 2, 3, len(steps) - 1, *range(len(steps) // 2 - 2, len(steps) // 2 + 2)}
    for number, batch in enumerate(batches):
        if number in looked_at:
            assert batch == plan.batch(steps[number], rank, world_size)
        assert batch.samples_seen == plan.samples_after(steps[number])
    assert number == len(steps) - 1


def test_beginning_late_costs_no_more_than_beginning_early() -> None:
    plan = ElasticBatches(dataset_size=10**12, global_batch=4, epochs=3)
    late = next(plan.iterate(0, 1, start_step=plan.total_steps - 1))
    assert late.step == plan.total_steps == 750_000_000_000
    assert late.samples_seen == 3 * 10**12


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0, 1), "dataset_size is 0"), ((1, 0), "global_batch is 0"), ((1, 1, 0, 0), "epochs is 0")],
)
def test_senseless_plans_are_refused(arguments: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ElasticBatches(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: ElasticBatches(0.9 * 20, 3), r"dataset_size is 18\.0; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: ElasticBatches(20, 256 / 3), r"global_batch is 85\.3.*; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: ElasticBatches(20, 3, seed=None), "seed is None; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: ElasticBatches(20, 3).iterate("0", 2), "rank is '0'; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: ElasticBatches.over([1, 2], 3), r"a list is no source .* ElasticBatches\(len\(dataset\)"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_is_refused_by_name(make: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    plan = ElasticBatches(np.int64(20), np.int32(3), seed=np.uint8(1))  # type: ignore[arg-type]
    assert plan == ElasticBatches(20, 3, seed=1)
    assert json.loads(json.dumps(plan.state_dict(2))) == plan.state_dict(2)


def test_a_position_before_the_one_that_a_plan_was_resumed_at_is_no_position_of_it() -> None:
    """A loop that is stopped before its first step would otherwise save the position of another step with its weights."""
    plan = ElasticBatches(20, 3, epochs=2)
    resumed = plan.resumed(plan.state_dict(9))
    assert resumed.state_dict(9) == plan.state_dict(9)
    with pytest.raises(ValueError, match="step is 0, but this plan begins after step 9"):
        resumed.state_dict(0)
    with pytest.raises(ValueError, match="step is -1, but this plan begins after step 0"):
        plan.state_dict(-1)


def test_ranks_with_different_plans_or_the_same_rank_are_refused() -> None:
    """The store is torch's; whoever comes first is right."""
    store = HashStore()
    plan: dict[str, Any] = {"kind": "map", "size": 20, "seed": 0, "local_sizes": [1, 2], "sources": {"a": {"size": 3}}}
    for rank in (1, 0, 2):
        check_in_store(store, plan, rank, rank)
    with pytest.raises(
        DataError, match=r"rank 3 would train on other data .*: seed is 3 here and 0 there; make the same"
    ):
        check_in_store(store, {**plan, "seed": 3}, 3, 3)
    with pytest.raises(
        DataError, match="the processes of ranks 2 and 3 would both train on the samples of rank 2; give"
    ):
        check_in_store(store, plan, 2, 3)
    check_in_store(store, plan, 3, 3)


def test_a_place_beyond_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start_step is 8, but this job has 7 steps; was its data changed\?"):
        ElasticBatches(dataset_size=20, global_batch=3).iterate(0, 1, start_step=8)
    with pytest.raises(ValueError, match="step is 0"):
        ElasticBatches(dataset_size=20, global_batch=3).batch(0, 0, 1)
    with pytest.raises(ValueError, match="size is 0"):
        next(ElasticBatches(dataset_size=20, global_batch=3).batch(1, 0, 1).micro_batches(0))
    with pytest.raises(IndexError, match="position 20 is outside"):
        Shuffle(20, 0, 0)[20]
    with pytest.raises(ValueError, match="size is 0"):
        Shuffle(0, 0, 0)


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=7).filter(any),
    grain=st.integers(1, 5),
    size=st.integers(1, 60),
    is_even=st.booleans(),
)
def test_any_split_covers_once_in_whole_groups(sizes: list[int], grain: int, size: int, is_even: bool) -> None:
    split = BatchSplit.of(len(sizes), () if is_even else [each * grain for each in sizes], grain)
    parts = [split.part(size, rank) for rank in range(len(sizes))]
    assert [index for part in parts for index in part] == list(range(size))
    assert max(map(len, parts)) == split.largest(size)
    assert every(part.start % grain == 0 for part in parts if part)
    if not is_even and size == sum(sizes) * grain:
        assert [len(part) for part in parts] == [each * grain for each in sizes]


@given(
    dataset_size=SIZES,
    epochs=st.integers(1, 3),
    batches=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=6),
)
def test_the_batch_may_change_at_any_step_and_no_sample_moves(
    dataset_size: int, epochs: int, batches: list[tuple[int, int]]
) -> None:
    """The samples come in the same order whatever the batches are; the place goes through JSON at every change."""
    plan = ElasticBatches(dataset_size, batches[0][0], seed=1, epochs=epochs)
    wanted = [index for step in range(1, plan.total_steps + 1) for index in plan.batch(step, 0, 1).indices]
    seen: list[int] = []
    step = 0
    for number, (size, steps) in enumerate(batches):
        fresh = ElasticBatches(dataset_size, size, seed=1, epochs=epochs)
        plan = fresh.resumed(json.loads(json.dumps(plan.state_dict(step))))
        last = number == len(batches) - 1
        for batch in plan.iterate(0, 1, start_step=step):
            assert batch.step == step + 1
            assert batch.samples_seen == len(seen) + len(batch.indices)
            assert len(batch.indices) <= size
            step += 1
            seen += batch.indices
            if batch.step == plan.first_step + steps and not last:
                break
        assert plan.samples_after(step) == len(seen)
    assert seen == wanted
    assert step == plan.total_steps


def test_a_place_of_other_data_is_refused_by_name() -> None:
    plan = ElasticBatches(dataset_size=20, global_batch=3, seed=1)
    state = plan.state_dict(4)
    with pytest.raises(DataError, match="saved with seed 1, but now it is 2; resume with the same data"):
        ElasticBatches(dataset_size=20, global_batch=3, seed=2).resumed(state)
    with pytest.raises(DataError, match="saved with size 20, but now it is 21"):
        ElasticBatches(dataset_size=21, global_batch=3, seed=1).resumed(state)
    with pytest.raises(DataError, match="is after 21 samples, but 1 epochs of 20 have 20; it was saved with 1 epochs"):
        plan.resumed({**state, "samples": 21})
    with pytest.raises(DataError, match="version 2; this elastipod knows version 1"):
        plan.resumed({**state, "v": 2})
    with pytest.raises(DataError, match="this is not a data position of elastipod: KeyError"):
        plan.resumed({"step": 3})


def test_a_plan_that_was_resumed_begins_at_its_place() -> None:
    plan = ElasticBatches(dataset_size=20, global_batch=3, seed=1, epochs=2)
    resumed = plan.resumed(plan.state_dict(9))
    assert resumed.total_steps == plan.total_steps
    assert list(resumed.iterate(0, 2)) == list(plan.iterate(0, 2, start_step=9))
    with pytest.raises(
        ValueError, match="start_step is 3, but this job has 14 steps and this plan begins after step 9"
    ):
        resumed.iterate(0, 2, start_step=3)


def test_a_place_before_a_change_of_the_batch_is_gone_on_from() -> None:
    """The plan is the one that took over at step 4; the place, of a batch of 4, has as many samples as it would give step 3."""
    plan = ElasticBatches(dataset_size=80, global_batch=6).with_batch(12, after_step=4)
    before = ElasticBatches(dataset_size=80, global_batch=4).state_dict(3)
    assert before["samples"] == plan.samples_after(3)
    resumed = plan.resumed(before)
    assert next(resumed.iterate(0, 1, start_step=3)).samples_seen == 12 + 12


def test_more_epochs_may_be_added_to_a_job() -> None:
    state = ElasticBatches(dataset_size=20, global_batch=3).state_dict(7)
    longer = ElasticBatches(dataset_size=20, global_batch=3, epochs=2).resumed(state)
    assert [batch.step for batch in longer.iterate(0, 1, start_step=7)] == list(range(8, 15))


@pytest.mark.parametrize(
    ("sizes", "grain", "text"),
    [
        ([3, 3], 1, "local_sizes sum up to 6, but the global batch is 8"),
        ([3, 3, 2], 1, "local_sizes has 3 entries for a world of 2"),
        ([9, -1], 1, "must not be negative"),
        ([5, 3], 2, "a local size of 5 is not a multiple of the grain of 2"),
        ([4, 4], 0, "grain is 0"),
    ],
)
def test_local_sizes_that_do_not_fit_are_refused(sizes: list[int], grain: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ElasticBatches(20, 8).iterate(0, 2, local_sizes=sizes, grain=grain)


def test_a_rank_outside_the_world_is_refused_before_the_first_batch() -> None:
    with pytest.raises(ValueError, match="rank 2 is outside a world of 2"):
        ElasticBatches(20, 8).iterate(2, 2, local_sizes=[4, 4])
    with pytest.raises(ValueError, match="world_size is 0"):
        ElasticBatches(20, 8).iterate(0, 0)
    with pytest.raises(ValueError, match="the source has 5 samples"):
        ElasticBatches(20, 8, source=ElasticBatches(5, 5)._source())
