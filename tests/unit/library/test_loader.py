"""Loading ahead with worker processes: the place in the data is what was trained, never what was fetched."""

from __future__ import annotations

import gc
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.nonempty import every, some

from elastipod.data import ElasticBatches
from elastipod.data.loader import ElasticBatchSampler, ElasticLoader
from elastipod.data.mixture import Mixture
from elastipod.data.shards import ShardReader, Shards
from elastipod.data.tokens import TokenFile, TokenWindows
from elastipod.data.tokens_command import build
from elastipod.errors import DataError

PLAN = ElasticBatches(dataset_size=83, global_batch=9, seed=4, epochs=2)


class Rows(torch.utils.data.Dataset[int]):
    """A dataset whose samples are their indices."""

    def __len__(self) -> int:
        return PLAN.dataset_size

    def __getitem__(self, index: int) -> int:
        return index


def loader_of(plan: ElasticBatches, rank: int, world_size: int, **options: Any) -> ElasticLoader[torch.Tensor]:
    return ElasticLoader(Rows(), plan, rank=rank, world_size=world_size, micro_batch=2, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resizes_with_workers_lose_nothing_that_was_prefetched(num_workers: int) -> None:
    seen: Counter[tuple[int, int]] = Counter()
    state: dict[str, Any] | None = None
    prefetched = 0
    for world_size, steps in ((2, 7), (3, 6), (1, 99)):
        states = []
        for rank in range(world_size):
            with loader_of(PLAN, rank, world_size, num_workers=num_workers) as loader:
                if state:
                    loader.load_state_dict(state)
                for batch, passes in loader:
                    for part, data in passes:
                        assert data.tolist() == list(part.indices)
                        seen.update((batch.epoch, index) for index in data.tolist() if part.weight)
                    assert loader.step == batch.step
                    if batch.step == (state or {"step": 0})["step"] + steps:
                        break
                prefetched += loader.prefetched
                states.append(json.dumps(loader.state_dict()))
        assert len(set(states)) == 1
        state = json.loads(states[-1])
    assert seen == Counter({(epoch, index): 1 for epoch in range(2) for index in range(PLAN.dataset_size)})
    assert (prefetched > 20) == (num_workers > 0)


def test_a_batch_counts_from_its_last_pass_on() -> None:
    with loader_of(PLAN, 0, 1) as loader:
        batches = iter(loader)
        _, passes = next(batches)
        for part, _ in passes:
            assert loader.state_dict()["step"] == part.is_last, "what a save within this pass says"
        assert loader.step == 1
        _, passes = next(batches)
        next(passes)
        assert loader.state_dict()["step"] == 1
        batch, passes = next(batches)  # left early: the next batch still has its own data
        assert [data.tolist() for _, data in passes] == [list(part.indices) for part in batch.micro_batches(2)]


def test_worker_processes_end_with_the_loader_though_the_loop_left_its_names() -> None:
    before = psutil.Process().children()
    with loader_of(PLAN, 0, 1, num_workers=1) as loader:
        for _, passes in loader:
            next(passes)
            assert len(psutil.Process().children()) == len(before) + 1
            break
    assert psutil.Process().children() == before
    with pytest.raises(DataError, match="step 1 belongs to an iteration that has ended"):
        next(passes)


class Ring:
    """Garbage once it is left alone, whose end only the process that made it survives."""

    def __init__(self) -> None:
        self.itself, self.made_by = self, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.made_by:
            os._exit(1)


class Collecting(Rows):
    def __getitem__(self, index: int) -> int:
        gc.collect()
        return index


@pytest.mark.slow
@pytest.mark.parametrize("is_frozen", [False, True], ids=["", "with objects frozen before"])
def test_worker_processes_do_not_destroy_what_was_garbage_before_them(*, is_frozen: bool) -> None:
    gc.unfreeze()  # a sharded State in another test of this process has frozen what there was
    gc.collect()
    witness: list[object] = []
    if is_frozen:
        gc.freeze()
    try:
        Ring()
        loader: ElasticLoader[torch.Tensor] = ElasticLoader(
            Collecting(), PLAN, rank=0, world_size=1, micro_batch=9, num_workers=1
        )
        with loader:
            _, passes = next(iter(loader))
            assert len(list(passes)) == 1
        assert (gc.get_freeze_count() > 0) is is_frozen, "what was frozen before stays so, and nothing else does"
        assert every(each is not witness for each in gc.get_objects()) is is_frozen, "a frozen object is in no list"
    finally:
        gc.unfreeze()


def test_a_place_is_loaded_before_the_first_batch_or_refused() -> None:
    with loader_of(PLAN, 0, 1) as loader:
        next(iter(loader))
        with pytest.raises(DataError, match="before the first batch only"):
            loader.load_state_dict(PLAN.state_dict(3))


def test_a_plan_that_takes_over_begins_at_its_own_step() -> None:
    plan = PLAN.with_batch(5, after_step=4)
    with loader_of(plan, 0, 1) as loader:
        assert loader.state_dict() == plan.state_dict(4)
    passes = iter(ElasticBatchSampler(plan, rank=0, world_size=1, micro_batch=5))
    next(passes)
    assert passes.state_dict() == plan.state_dict(5)


def test_the_total_is_that_of_the_place_that_was_loaded() -> None:
    with loader_of(ElasticBatches(dataset_size=80, global_batch=20), 0, 1) as loader:
        assert loader.total_steps == 4
        loader.load_state_dict(ElasticBatches(dataset_size=80, global_batch=10).state_dict(2))
        assert loader.total_steps == 2 + 3
        assert [batch.step for batch, _ in loader][-1] == loader.total_steps


def test_data_out_of_order_is_refused() -> None:
    with pytest.raises(DataError, match="in_order=False gives passes the data of other passes"):
        loader_of(PLAN, 0, 1, in_order=False)


class Stream(torch.utils.data.IterableDataset[int]):
    """Samples from the front only."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (range(82), "the dataset has 82 samples, but the plan has indices up to 82; was the data changed"),
        (Stream(), "a Stream does not give samples by index, .* Shards and a ShardReader"),
        (iter([1]), "a list_iterator does not give samples by index"),
    ],
)
def test_data_that_the_plan_does_not_fit_is_refused_before_training(dataset: Any, text: str) -> None:
    with pytest.raises(DataError, match=text):
        ElasticLoader[Any](dataset, PLAN, rank=0, world_size=1, micro_batch=2)


def test_data_may_have_more_samples_than_the_plan_or_not_say_how_many() -> None:
    class Endless(torch.utils.data.Dataset[int]):
        def __getitem__(self, index: int) -> int:
            return index

    for dataset in (range(100), Endless()):
        with ElasticLoader[Any](dataset, PLAN, rank=0, world_size=1, micro_batch=9) as loader:  # type: ignore[arg-type]
            assert len(list(loader)) == PLAN.total_steps


def test_a_mixture_needs_as_many_samples_as_its_sources_have() -> None:
    plan = ElasticBatches.over(Mixture({"a": 30, "b": 11}, {"a": 3, "b": 1}, samples=8), 4)
    with pytest.raises(DataError, match="the dataset has 40 samples, but the plan has indices up to 40"):
        ElasticLoader[Any](range(40), plan, rank=0, world_size=1, micro_batch=2)  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"])
def test_options_that_the_plan_decides_are_refused(option: str) -> None:
    with pytest.raises(DataError, match=f"{option} cannot be given: the plan decides the order of the samples"):
        loader_of(PLAN, 0, 1, **{option: True})


class Seeds(Rows):
    """A dataset whose samples are what the process that loads them draws first."""

    def __getitem__(self, index: int) -> int:
        return int(torch.initial_seed() % 2**62)


def seed_of(rank: int, step: int) -> int:
    """Give the seed of the worker process of a rank that begins after so many steps."""
    loader = ElasticLoader[torch.Tensor](
        Seeds(), PLAN, rank=rank, world_size=2, micro_batch=5, start_step=step, num_workers=1
    )
    with loader:
        _, passes = next(iter(loader))
        return int(next(iter(passes))[1][0])


def test_loading_leaves_the_random_state_of_training_alone() -> None:
    """A resume restores it before the loader is made; and workers draw other numbers on every rank, the same in every try."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    seeds = [seed_of(rank, step) for rank, step in ((0, 0), (1, 0), (0, 2), (0, 0))]
    with loader_of(PLAN, 0, 1) as loader:
        assert len(list(loader)) == PLAN.total_steps
    assert torch.equal(torch.get_rng_state(), before)
    assert seeds[0] == seeds[3]
    assert len(set(seeds)) == 3
    torch.manual_seed(4)
    assert seed_of(0, 0) not in seeds


def test_without_workers_samples_are_fetched_and_put_together_as_a_data_loader_does() -> None:
    fetched: list[list[int]] = []

    class Many(Rows):
        def __getitems__(self, indices: list[int]) -> list[int]:
            fetched.append(indices)
            return [10 * index for index in indices]

    with ElasticLoader[list[int]](Many(), PLAN, rank=0, world_size=1, micro_batch=5, collate_fn=sorted) as loader:
        for _, passes in loader:
            for part, data in passes:
                assert fetched.pop() == list(part.indices)
                assert data == sorted(10 * index for index in part.indices)
    with pytest.raises(ValueError, match="prefetch_factor"):
        next(iter(loader_of(PLAN, 0, 1, prefetch_factor=3)))


def stateful(rank: int, world_size: int) -> Any:
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="the extra elastipod[data] is not installed"
    )
    sampler = ElasticBatchSampler(PLAN, rank=rank, world_size=world_size, micro_batch=2)
    return torchdata.StatefulDataLoader(Rows(), batch_sampler=sampler, num_workers=2)


def passes_of(plan: ElasticBatches, rank: int, world_size: int, step: int) -> Iterator[tuple[int, int, int, float]]:
    for batch in plan.iterate(rank, world_size, start_step=step):
        for part in batch.micro_batches(2):
            yield batch.step, batch.epoch, part.is_last, part.weight


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.10 and newer
def test_a_stateful_data_loader_with_workers_goes_on_in_another_world() -> None:
    """What torchdata saved on one rank is loaded on all ranks of a larger world."""
    seen: Counter[tuple[int, int]] = Counter()
    state: dict[str, Any] | None = None
    step = 0
    for world_size, leave_after in ((2, 5), (3, 12), (1, PLAN.total_steps)):
        saved = []
        for rank in range(world_size):
            loader = stateful(rank, world_size)
            if state:
                loader.load_state_dict(state)
            rows = iter(loader)
            for at, epoch, is_last, weight in passes_of(PLAN, rank, world_size, step):
                data = next(rows).tolist()
                seen.update((epoch, index) for index in data if weight)
                if is_last and at == leave_after:
                    break
            saved.append(loader.state_dict())
            del rows, loader
        state, step = saved[0], leave_after
    assert seen == Counter({(epoch, index): 1 for epoch in range(2) for index in range(PLAN.dataset_size)})


def test_a_half_trained_step_is_given_again_from_its_first_pass() -> None:
    sampler = ElasticBatchSampler(PLAN, rank=0, world_size=1, micro_batch=2)
    passes = iter(sampler)
    for _ in range(7):  # five passes of the first step, two of the second
        next(passes)
    state = passes.state_dict()
    assert state["step"] == 1
    again = iter(sampler)
    again.load_state_dict(state)
    assert next(again) == list(PLAN.batch(2, 0, 1).indices[:2])


class Reversed(TokenWindows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index).flip(0)

    def __getitems__(self, indices: Sequence[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("kind", [TokenWindows, Reversed])
def test_token_windows_come_as_one_tensor_for_each_pass(
    tmp_path: Path, kind: type[TokenWindows], num_workers: int
) -> None:
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog" * 3)
    build(tmp_path / "tokens", [tmp_path / "text"])
    windows: Any = kind(TokenFile(tmp_path / "tokens"), 16)
    plan = ElasticBatches(len(windows), 5)
    with ElasticLoader[torch.Tensor](
        windows, plan, rank=0, world_size=1, micro_batch=3, num_workers=num_workers
    ) as loader:
        num_batches = 0
        for _, passes in loader:
            for part, data in some(passes):
                assert torch.equal(data, torch.stack([windows[index] for index in part.indices]))
            num_batches += 1
    assert num_batches == plan.total_steps


SHARDS = Shards([13, 29, 7, 20], lanes=4, seed=1)


def numbers(shard: int, first: int) -> range:
    return range(SHARDS.starts[shard] + first, SHARDS.starts[shard + 1])


def test_workers_read_shards() -> None:
    plan = ElasticBatches.over(SHARDS, 5)
    dataset: Any = ShardReader(SHARDS, numbers)
    found = []
    for rank in range(2):
        with ElasticLoader[torch.Tensor](
            dataset, plan, rank=rank, world_size=2, micro_batch=2, num_workers=2
        ) as loader:
            for _, passes in loader:
                found += [index for part, data in passes if part.weight for index in data.tolist()]
    assert sorted(found) == list(range(len(SHARDS)))


# -- as a member of State ------------------------------------------------------------------------------------------


def read(
    loader: ElasticLoader[torch.Tensor], step: int, rank: int, world_size: int, plan: ElasticBatches = PLAN
) -> int:
    """Take the passes of one batch of the loop; give how many samples there were."""
    batch = plan.batch(step, rank, world_size)
    data = [index for part, loaded in loader.passes(batch) if part.weight for index in loaded.tolist()]
    assert data == list(batch.indices)
    return len(data)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_without_a_rank_it_follows_the_worlds_and_the_steps_of_a_loop(num_workers: int) -> None:
    loader = ElasticLoader[torch.Tensor](Rows(), PLAN, micro_batch=2, num_workers=num_workers)
    with pytest.raises(
        TypeError, match=r"^the loader has no rank yet; give it rank and world_size, or dp_mesh, or make"
    ):
        loader.passes(PLAN.batch(1, 0, 1))
    loader.set_world(0, 1)
    assert [read(loader, step, 0, 1) for step in (1, 2)] == [9, 9]
    assert loader.step == 2
    loader.set_world(1, 3)
    assert [read(loader, step, 1, 3) for step in (3, 4)] == [3, 3]
    saved = loader.state_dict()
    assert saved["step"] == 4
    assert read(loader, 4, 1, 3) == 3, "a loop that goes back is followed"
    assert read(loader, 5, 1, 3) == 3
    loader.load_state_dict(saved)  # the step was broken off
    assert loader.step == 4
    assert [read(loader, step, 1, 3) for step in range(5, 11)] == [3, 3, 3, 3, 3, 1], (
        "the last batch of an epoch has two samples"
    )
    loader.close()


def test_a_batch_that_a_rank_has_left_early_counts_all_the_same() -> None:
    with ElasticLoader[torch.Tensor](Rows(), PLAN, micro_batch=2) as loader:
        loader.set_world(0, 2)
        next(loader.passes(PLAN.batch(1, 0, 2)))
        assert loader.step == 1
        assert read(loader, 2, 0, 2) == 4
        loader.passes(PLAN.batch(3, 0, 2))
        assert loader.step == 3
        assert read(loader, 4, 0, 2) == 4


OTHER_SAMPLES = (
    "the loader's plan has other samples at step 1 than the loop's; give State.steps and the loader the same plan"
)


@pytest.mark.parametrize("plan", [ElasticBatches(83, 9, seed=5), ElasticBatches(83, 8, seed=4)])
def test_a_loop_with_another_plan_is_told(plan: ElasticBatches) -> None:
    with ElasticLoader[torch.Tensor](Rows(), PLAN, micro_batch=2) as loader:
        loader.set_world(0, 1)
        with pytest.raises(DataError, match=f"^{OTHER_SAMPLES}"):
            loader.passes(plan.batch(1, 0, 1))
        assert read(loader, 1, 0, 1) == 9, "it goes on with the right one"


def test_a_loop_that_is_longer_than_the_loaders_plan_is_told() -> None:
    with ElasticLoader[torch.Tensor](Rows(), ElasticBatches(83, 9, seed=4), micro_batch=2) as loader:
        loader.set_world(0, 1)
        read(loader, 10, 0, 1)
        with pytest.raises(DataError, match=r"^the loader's plan has other samples at step 11 than"):
            loader.passes(PLAN.batch(11, 0, 1))
