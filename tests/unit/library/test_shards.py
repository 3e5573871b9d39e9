"""Shards that are read from the front: every sample once per epoch, and few shards opened twice."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod.data import ElasticBatches
from elastipod.data.shards import MAX_SKIPPED, ShardReader, Shards, shard_lengths
from elastipod.errors import DataError

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


class Files:
    """Made-up shards that note where they were opened."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.opened: list[tuple[int, int]] = []
        self.closed = 0

    def open(self, shard: int, first: int) -> Iterator[str]:
        self.opened.append((shard, first))
        try:
            for place in range(first, self.lengths[shard]):
                yield f"{shard}/{place}"
        finally:
            self.closed += 1


@given(lengths=LENGTHS, lanes=st.integers(1, 9), seed=st.integers(0, 99), epoch=st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(lengths: list[int], lanes: int, seed: int, epoch: int) -> None:
    shards = Shards(lengths, lanes=lanes, seed=seed)
    order = shards.order(epoch)
    assert sorted(order[position] for position in range(len(shards))) == list(range(sum(lengths)))


@given(lengths=LENGTHS, lanes=st.integers(1, 9))
def test_samples_of_a_shard_come_in_their_order(lengths: list[int], lanes: int) -> None:
    shards = Shards(lengths, lanes=lanes)
    places = [shards.locate(shards.order(0)[position]) for position in range(len(shards))]
    for shard, length in enumerate(lengths):
        assert [place for number, place in places if number == shard] == list(range(length))


@given(lengths=LENGTHS, lanes=st.integers(1, 9), world_size=st.integers(1, 5))
def test_readers_give_the_samples_of_the_plan(lengths: list[int], lanes: int, world_size: int) -> None:
    shards = Shards(lengths, lanes=lanes)
    plan = ElasticBatches.over(shards, 7, epochs=2)
    found = []
    for rank in range(world_size):
        files = Files(lengths)
        reader = ShardReader(shards, files.open, max_open=3)
        for batch in plan.iterate(rank, world_size):
            for index, sample in zip(batch.indices, reader.__getitems__(batch.indices), strict=True):
                shard, place = shards.locate(index)
                assert sample == f"{shard}/{place}"
                found.append(sample)
        reader.close()
        assert files.closed == len(files.opened)
    wanted = [f"{shard}/{place}" for shard, length in enumerate(lengths) for place in range(length)]
    assert sorted(found) == sorted(wanted * 2)


def test_equal_shards_are_opened_once_each_by_one_rank() -> None:
    """As many lanes as samples in the batch: a rank reads its lanes from the front; at a resize each goes on elsewhere."""
    lengths = [20] * 16
    shards = Shards(lengths, lanes=8, seed=3)
    plan = ElasticBatches.over(shards, 8)
    opened = []
    for world_size, steps in ((2, range(10)), (4, range(10, 40))):
        for rank in range(world_size):
            files = Files(lengths)
            reader = ShardReader(shards, files.open)
            for batch in plan.iterate(rank, world_size, start_step=steps.start):
                if batch.step > steps.stop:
                    break
                for index in batch.indices:
                    reader[index]
            opened += files.opened
            reader.close()
    assert len(opened) == 24, "16 shards, and 8 that were open at the resize"
    assert sorted(first for _, first in opened) == [0] * 16 + [10] * 8


def test_samples_that_others_took_are_read_over_when_they_are_near() -> None:
    files = Files([500])
    reader = ShardReader(Shards([500], lanes=1), files.open)
    assert [reader[0], reader[MAX_SKIPPED], reader[10], reader[200]] == ["0/0", f"0/{MAX_SKIPPED}", "0/10", "0/200"]
    assert files.opened == [(0, 0), (0, 10), (0, 200)]
    reader.close()


def test_a_shard_shorter_than_its_length_is_an_error_and_not_less_data() -> None:
    files = Files([3])
    reader = ShardReader(Shards([5], lanes=1), files.open)
    with pytest.raises(DataError, match="shard 0 ends before its sample 4, but it was said to have 5"):
        reader[4]


def lines_of(shard: int, first: int) -> list[int]:
    return list(range(first, 10 * (shard + 1)))


def test_a_reader_goes_to_another_process_without_its_open_shards() -> None:
    reader = ShardReader(Shards([10, 20], lanes=2), lines_of)
    assert reader[3] == 3
    assert pickle.loads(pickle.dumps(reader))[12] == 2


def test_a_forked_process_leaves_alone_what_its_parent_has_open(monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files([20])
    reader = ShardReader(Shards([20], lanes=1), files.open)
    assert reader[0] == "0/0"
    parents = reader._open[0]
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert reader[1] == "0/1"
    reader.close()
    assert files.opened == [(0, 0), (0, 1)]
    assert files.closed == 1
    assert parents.place == 1


def test_shards_listed_in_another_order_are_other_data() -> None:
    plan = ElasticBatches.over(Shards([100, 300] * 2, lanes=2), 8)
    other = ElasticBatches.over(Shards([300, 100] * 2, lanes=2), 8)
    with pytest.raises(DataError, match="was saved with lengths"):
        other.resumed(plan.state_dict(3))


class Shared(Shards):
    """Another thread stores its epoch's order right after this one has stored its own."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, (1, self._assign_lanes(1)) if name == "_latest" and value else value)


def test_threads_in_other_epochs_do_not_share_an_order() -> None:
    lengths = [5] * 8
    order, wanted = Shared(lengths, lanes=4).order(0), Shards(lengths, lanes=4).order(0)
    assert [order[position] for position in range(40)] == [wanted[position] for position in range(40)]


def test_lengths_are_counted_once(tmp_path: Path) -> None:
    files, index = Files([4, 0, 7]), tmp_path / "index.json"
    assert shard_lengths(files.open, 3, index) == shard_lengths(files.open, 3, index) == [4, 0, 7]
    assert len(files.opened) == 3
    with pytest.raises(DataError, match="counts 3 shards, but there are 2; remove it"):
        shard_lengths(files.open, 2, index)
    for text in ("{", "[]", '{"lengths": ["a"]}'):
        index.write_text(text)
        with pytest.raises(DataError, match="is not an index of shards"):
            shard_lengths(files.open, 3, index)


@pytest.mark.parametrize(("lengths", "lanes"), [([], 1), ([0], 1), ([3, -1], 1), ([3], 0)])
def test_senseless_shards_are_refused(lengths: list[int], lanes: int) -> None:
    with pytest.raises(ValueError, match=r"lanes is 0|lengths must contain at least one sample"):
        Shards(lengths, lanes=lanes)


def test_places_outside_are_refused() -> None:
    shards = Shards([2], lanes=1)
    with pytest.raises(IndexError, match="sample 2 is outside of 2 samples"):
        shards.locate(2)
    with pytest.raises(IndexError, match="position 2 is outside an epoch of 2"):
        shards.order(0)[2]
