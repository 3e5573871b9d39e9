"""What all integrations share: the passes of a rank, and what is refused at a resume."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod.batches.batch_plan import plan_batch
from elastipod.data.elastic_batches import ElasticBatches
from elastipod.errors import BatchSizeError, DataError
from elastipod.integrations.elastic_run import ElasticRun, equal_cut
from elastipod.integrations.marks import MarkedCheckpoints
from elastipod.rank_in_world import RankInWorld

NAME = re.compile(r"checkpoint-(\d+)")


def run_in(folder: Path, plan: ElasticBatches) -> ElasticRun:
    return ElasticRun(plan, MarkedCheckpoints(folder, NAME), max_micro_batch=4)


def save(run: ElasticRun) -> None:
    path = run.checkpoints.directory / f"checkpoint-{run.step}"
    run.begin_save(path)
    path.mkdir(exist_ok=True)
    run.finish_save(path)


def test_a_run_continues_after_the_steps_that_were_saved(tmp_path: Path) -> None:
    plan = ElasticBatches(20, 6, epochs=2)
    run = run_in(tmp_path, plan)
    assert run.step == 0
    run.step_done(1)
    save(run)
    assert run_in(tmp_path, plan).step == 1


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (ElasticBatches(20, 5, epochs=2), "saved with a global batch of 6, but now it is 5"),
        (ElasticBatches(21, 6, epochs=2), "saved with size 20, but now it is 21"),
        (ElasticBatches(20, 6, seed=1, epochs=2), "saved with seed 0, but now it is 1"),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path, other: ElasticBatches, sentence: str) -> None:
    run = run_in(tmp_path, ElasticBatches(20, 6, epochs=2))
    run.step_done(1)
    save(run)
    with pytest.raises(DataError, match=sentence):
        run_in(tmp_path, other)


@pytest.mark.parametrize(
    ("batch", "world", "limit", "passes"),
    [(12, 2, 4, [3, 3]), (12, 3, 4, [4]), (12, 1, 5, [4, 4, 4]), (14, 2, 4, [1] * 7), (12, 12, 4, [1])],
)
def test_equal_passes_are_the_largest_that_divide_a_share(
    batch: int, world: int, limit: int, passes: list[int]
) -> None:
    cut = equal_cut(ElasticBatches(5 * batch, batch), world, limit)
    assert [cut.micro_batch] * cut.passes == passes


@pytest.mark.parametrize(
    ("size", "world", "sentence"),
    [
        (24, 5, "cannot be shared out evenly to 5 data-parallel ranks; world sizes that would work: 1, 2, 3, 4, 6, 12"),
        (26, 2, "ends with a batch of 2 instead of 12; leave 2 samples out, or take a global batch that divides 26"),
    ],
)
def test_sizes_without_equal_passes_are_refused(size: int, world: int, sentence: str) -> None:
    with pytest.raises(BatchSizeError, match=sentence):
        equal_cut(ElasticBatches(size, 12), world, 4)


@given(
    size=st.integers(1, 60),
    batch=st.integers(1, 13),
    limit=st.integers(1, 5),
    world=st.integers(1, 13),
    epoch=st.integers(0, 1),
)
def test_the_passes_of_an_epoch_are_its_samples_and_those_of_its_steps(
    tmp_path_factory: pytest.TempPathFactory, size: int, batch: int, limit: int, world: int, epoch: int
) -> None:
    plan = ElasticBatches(size, batch, epochs=2)
    if world > batch:
        with pytest.raises(BatchSizeError, match="world sizes that would work"):
            plan_batch(batch, world, max_micro_batch=limit)
        return
    used: Counter[int] = Counter()
    for rank in range(world):
        run = object.__new__(ElasticRun)  # one process has only rank 0 of 1
        run.plan, run.place = plan, RankInWorld(rank, world)
        run.cut = plan_batch(batch, world, max_micro_batch=limit)
        passes = list(run.epoch_passes(epoch))
        assert len(passes) == run.passes_per_epoch
        steps = range(epoch * plan.steps_per_epoch + 1, (epoch + 1) * plan.steps_per_epoch + 1)
        parts = [part for step in steps for part in run.passes(step)]
        assert [list(part.indices) for part in parts] == passes
        assert max(map(len, passes)) <= limit
        assert {len(run.passes(step)) for step in list(steps)[:-1]} <= {run.cut.passes}
        used.update(index for part in parts if part.weight for index in part.indices)
    assert used == Counter(range(size))
