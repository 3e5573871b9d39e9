"""Before the first batch of a process group the ranks compare their plans in its store. The world is torch's fake one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # it registers the backend

from elastipod import torch_compat
from elastipod.data import ElasticBatches, plan_check
from elastipod.errors import DataError
from elastipod.gradients import accumulate, accumulate_padded

PLAN = ElasticBatches(40, 8, seed=1, epochs=2)


@pytest.fixture(autouse=True)
def generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test is a generation of its own, the first."""
    monkeypatch.setattr(plan_check, "_checked", None)
    monkeypatch.setenv("ELASTIPOD_GENERATION", "1")


@contextmanager
def world(store: HashStore, rank: int, world_size: int = 2) -> Iterator[None]:
    """Be a rank of a process group."""
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def as_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_check, "_checked", None)


@pytest.mark.parametrize(
    ("plan", "options", "told"),
    [
        (ElasticBatches(40, 8, seed=2, epochs=2), {}, "seed is 2 here and 1 there"),
        (ElasticBatches(41, 8, seed=1, epochs=2), {}, "size is 41 here and 40 there"),
        (ElasticBatches(40, 8, seed=1, epochs=2, shuffle=False), {}, "shuffle is False here and True there"),
        (ElasticBatches(40, 8, seed=1, epochs=3), {}, "epochs is 3 here and 2 there"),
        (ElasticBatches(40, 10, seed=1, epochs=2), {}, "global_batch is 10 here and 8 there"),
        (PLAN, {"start_step": 2}, "start_step is 2 here and 0 there"),
        (PLAN, {"local_sizes": [3, 5]}, r"local_sizes is \[3, 5\] here and \[\] there"),
        (PLAN, {"grain": 2}, "grain is 2 here and 1 there"),
        (PLAN.with_batch(8, after_step=0).resumed({**PLAN.state_dict(0), "samples": 3}), {}, "samples before it is 3 here and 0 there"),
    ],
)  # fmt: skip
def test_a_rank_with_another_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch, plan: ElasticBatches, options: dict[str, Any], told: str
) -> None:
    store = HashStore()
    with world(store, 0):
        assert next(PLAN.iterate(0, 2)).step == 1
    as_other_process(monkeypatch)
    with (
        world(store, 1),
        pytest.raises(DataError, match=f"^rank 1 would train on other data .*: {told}; make the same"),
    ):
        plan.iterate(1, 2, **options)


def test_two_processes_with_one_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    with world(store, 0):
        PLAN.iterate(0, 2)
    as_other_process(monkeypatch)
    with (
        world(store, 1),
        pytest.raises(DataError, match=r"^the processes of ranks 0 and 1 would both train on the samples of rank 0;"),
    ):
        PLAN.iterate(0, 2)


def prefixes_of(rank: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give where a rank of three groups, two of them of one generation, looks for the plan. Each group has another plan."""
    found: list[str] = []

    def store_at(prefix: str) -> HashStore:
        found.append(prefix)
        return HashStore()

    as_other_process(monkeypatch)
    monkeypatch.setattr(torch_compat, "default_group_store", store_at)
    for seed, generation in enumerate(("1", "1", "2")):
        monkeypatch.setenv("ELASTIPOD_GENERATION", generation)
        with world(HashStore(), rank):
            assert next(ElasticBatches(40, 8, seed=seed).iterate(rank, 2)).step == 1
            assert next(PLAN.iterate(rank, 2)).step == 1, (
                "a second plan, such as that of an evaluation, is not compared"
            )
    return found


def test_each_group_is_checked_once_at_a_place_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups may share a store, as those before and after a restart in the same processes do."""
    places = prefixes_of(0, monkeypatch)
    assert len(set(places)) == len(places) == 3
    assert prefixes_of(1, monkeypatch) == places


@pytest.mark.parametrize(("world_size", "of_plan"), [(4, 2), (1, 1)], ids=["model parallel", "alone"])
def test_ranks_that_are_not_all_the_worlds_are_not_compared(world_size: int, of_plan: int) -> None:
    store = HashStore()
    with world(store, 0, world_size):
        before = store.num_keys()
        assert next(PLAN.iterate(0, of_plan)).step == 1
        assert store.num_keys() == before


def test_tokens_are_counted_over_all_ranks() -> None:
    """The fake world's sum is this rank's number; the mean is over the four ranks."""
    model = torch.nn.Linear(1, 1)
    batch = PLAN.batch(1, 0, 2)
    with world(HashStore(), 0, 4):
        assert [part.weight for part in accumulate(model, batch, 2, tokens=20)] == [4 / 20] * 2
        (part,) = accumulate_padded(model, batch, 5, tokens=1)
        assert (part.row_weights, part.rows) == ((4.0,) * 4 + (0.0,), (0, 1, 2, 3, 0))
        with pytest.raises(
            ValueError, match=r"^tokens is -1; it is the number of tokens in this rank's samples, at least 0$"
        ):
            next(accumulate(model, batch, tokens=-1))
    with world(HashStore(), 0, 3), pytest.raises(ValueError) as refused:  # noqa: PT011
        next(accumulate(model, batch, tokens=20))
    assert str(refused.value) == (
        "the batch is divided over 2 ranks, but torch.distributed has 3; tokens can only be counted over all of them"
    )
