"""Losses that are summed over tokens: what each pass weighs, and which batches and counts are refused."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from elastipod import collectives, gradients
from elastipod.data import Batch, ElasticBatches
from elastipod.gradients import (
    PaddedMicroBatch,
    accumulate,
    accumulate_padded,
    announce_reduced_gradients,
    observe_reduced_gradients,
)
from elastipod.rank_in_world import RankInWorld

PLAN = ElasticBatches(10, 10)
MODEL = nn.Identity()


class World:
    """A world of some ranks, in which `total` tokens are counted. told: what this rank says that it has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int, total: int) -> None:
        self.told: list[int] = []
        self.total = total
        monkeypatch.setattr(collectives, "sum_over_ranks", self._sum)
        monkeypatch.setattr(RankInWorld, "current", lambda: RankInWorld(0, ranks))

    def _sum(self, own: int) -> int:
        self.told.append(own)
        return self.total


def batch(*sizes: int) -> Batch:
    return next(PLAN.iterate(0, len(sizes), local_sizes=sizes))


def test_a_summed_loss_is_divided_by_the_tokens_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 4, 80)
    passes = list(accumulate(MODEL, batch(3, 7), 2, tokens=24))
    assert [(len(each.indices), each.weight, each.is_last) for each in passes] == [
        (2, 4 / 80, False), (1, 4 / 80, False), (1, 0.0, False), (1, 0.0, True),
    ]  # fmt: skip
    assert world.told == [24], "once for a step"


def test_padded_passes_weigh_their_own_rows_alike_and_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2, 40)
    own = batch(3, 7)
    passes = list(accumulate_padded(MODEL, own, 5, tokens=12))
    indices = own.indices
    first = (*indices, indices[0], indices[1])
    nothing = tuple(indices[row % 3] for row in range(5))
    assert passes == [
        PaddedMicroBatch(first, (0.05, 0.05, 0.05, 0.0, 0.0), (0, 1, 2, 0, 1), False),
        PaddedMicroBatch(nothing, (0.0,) * 5, (0, 1, 2, 0, 1), True),
    ]
    assert world.told == [12]
    plain = list(accumulate_padded(MODEL, own, 5))
    assert [each.row_weights for each in plain] == [(0.2, 0.2, 0.2, 0.0, 0.0), (0.0,) * 5]
    assert world.told == [12], "samples need not be counted"


def test_what_a_rank_without_samples_counts_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2, 40)
    list(accumulate(MODEL, batch(0, 10), 5, tokens=12))
    assert world.told == [0]


def test_a_batch_in_which_nothing_counts_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, 2, 0)
    assert [each.weight for each in accumulate(MODEL, batch(4, 6), 6, tokens=0)] == [0.0]
    assert world.told == [0]


@pytest.mark.parametrize(
    ("ranks", "tokens", "said"),
    [
        (2, -1, "tokens is -1; it is the number of tokens in this rank's samples, at least 0"),
        (
            3, 5,
            "the batch is divided over 2 ranks, but torch.distributed has 3; tokens can only be counted over all of them",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_counted_is_refused_before_the_others_are_asked(
    monkeypatch: pytest.MonkeyPatch, ranks: int, tokens: int, said: str
) -> None:
    world = World(monkeypatch, ranks, 40)
    with pytest.raises(ValueError, match=f"^{said}$"):
        next(accumulate(MODEL, batch(5, 5), tokens=tokens))
    assert world.told == []


def test_only_the_last_pass_reduces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Sync:
        def __init__(self, *arguments: Any) -> None:
            asked.append(arguments)

        def __enter__(self) -> None:
            asked.append("begins")

        def __exit__(self, *_: object) -> None:
            asked.append("ends")

    monkeypatch.setattr(gradients, "gradient_sync", Sync)
    for _ in accumulate(MODEL, batch(4, 6), 4):
        asked.append("pass")
    pair = [(MODEL, False), "begins", "pass", "ends", (MODEL, True), "begins", "pass", "ends"]
    assert asked == pair
    asked.clear()
    for _ in accumulate_padded(MODEL, batch(4, 6), 4):
        asked.append("pass")
    assert asked == pair


def test_who_observes_hears_each_announcement_until_that_ends() -> None:
    heard: list[tuple[str, float]] = []
    ends = observe_reduced_gradients(lambda divisor: heard.append(("first", divisor)))

    def once(divisor: float) -> None:
        heard.append(("second", divisor))
        end_second()

    end_second = observe_reduced_gradients(once)
    announce_reduced_gradients(2.0)
    announce_reduced_gradients(3.0)
    ends()
    announce_reduced_gradients(4.0)
    assert heard == [("first", 2.0), ("second", 2.0), ("first", 3.0)]
