"""What the data layer asks of orders, shards, files and folders: how often, with what names, and up to which bound."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastipod.data import batch_cache, elastic_batches
from elastipod.data.batch_cache import BatchCache
from elastipod.data.elastic_batches import Batch, ElasticBatches
from elastipod.data.shards import ShardReader, Shards, shard_lengths
from elastipod.data.sources import MapSource
from elastipod.errors import DataError
from elastipod.rank_in_world import RankInWorld

# -- plans -------------------------------------------------------------------------------------------------------------


class Looked:
    """A source in order that notes how many samples are looked up at once."""

    def __init__(self, size: int, *, takes: bool) -> None:
        self.size, self.asked = size, []  # type: ignore[var-annotated]
        self._takes = takes

    def __len__(self) -> int:
        return self.size

    def describe(self) -> dict[str, Any]:
        return {"kind": "looked"}

    def order(self, epoch: int) -> Any:
        asked = self.asked

        class Order:
            def __getitem__(self, position: int) -> int:
                asked.append((epoch, position))
                return position

        class TakingOrder(Order):
            def take(self, positions: list[int]) -> list[int]:
                asked.append((epoch, len(positions)))
                return list(positions)

        return TakingOrder() if self._takes else Order()


def test_more_and_more_samples_are_looked_up_at_once_and_anew_in_each_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_batches, "_MAX_LOOKUP", 8)
    source = Looked(40, takes=True)
    batches = ElasticBatches.over(source, 3, epochs=2).iterate(0, 1)
    found = [next(batches) for _ in range(2)]
    assert source.asked == [(0, 3), (0, 3)], "no more than is asked for at first"
    found += batches
    assert source.asked == [(0, 3), (0, 3), (0, 6), (0, 9), (0, 9), (0, 9), (0, 1), *[(1, 9)] * 4, (1, 4)]
    assert [batch.indices for batch in found if batch.epoch == 1] == [
        tuple(range(first, min(first + 3, 40))) for first in range(0, 40, 3)
    ]


def test_an_order_without_a_lookup_of_many_is_asked_for_one_batch_at_a_time() -> None:
    source = Looked(12, takes=False)
    batches = ElasticBatches.over(source, 3).iterate(0, 1)
    next(batches)
    next(batches)
    assert source.asked == [(0, position) for position in range(6)]


def test_all_of_a_plan_is_compared_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[Any, RankInWorld]] = []
    monkeypatch.setattr(elastic_batches, "check_same_plan", lambda plan, place: compared.append((plan, place)))
    plan = ElasticBatches(20, 6, seed=3, epochs=2, shuffle=False)
    plan.iterate(1, 2, 2, local_sizes=(2, 4), grain=2)
    described = {"kind": "map", "size": 20, "seed": 3, "shuffle": False}
    position = {"start_step": 2, "samples before it": 12, "epochs": 2}
    cut = {"global_batch": 6, "local_sizes": [2, 4], "grain": 2}
    assert compared == [({**described, **position, **cut}, RankInWorld(1, 2, (2, 4)))]
    assert list(compared[0][0]) == [*described, *position, *cut]
    plan.iterate_at(RankInWorld(0, 1), is_compared=True)
    assert len(compared) == 1, "the caller has done so"
    plan.with_batch(5, after_step=3).iterate(0, 1)
    assert compared[1][0] | {"kind": "map"} == {
        **described, "start_step": 3, "samples before it": 18, "epochs": 2, "global_batch": 5, "local_sizes": [], "grain": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("place", "start_step", "told"),
    [
        (("x", 1), 0, "rank is 'x'; it must be a whole number"),
        ((0, 1.5), 0, "world_size is 1.5; it must be a whole number"),
        ((0, 1), "2", "start_step is '2'; it must be a whole number"),
    ],
)
def test_numbers_of_a_rank_are_named(place: tuple[Any, Any], start_step: Any, told: str) -> None:
    with pytest.raises(TypeError) as raised:
        ElasticBatches(20, 6).iterate_at(RankInWorld(*place), start_step)
    assert str(raised.value) == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"grain": "2"}, "grain is '2'; it must be a whole number"),
        ({"grain": 1.5}, "grain is 1.5; it must be a whole number"),
        ({"local_sizes": (3, "3")}, "local_sizes[1] is '3'; it must be a whole number"),
    ],
)
def test_how_batches_are_cut_is_told_in_whole_numbers(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError) as raised:
        ElasticBatches(20, 6).iterate(0, 2, **arguments)
    assert str(raised.value) == told


def test_numbers_of_another_type_cut_a_batch_as_well() -> None:
    numbers: Any = torch.tensor([2, 4])
    batches = ElasticBatches(20, 6, shuffle=False).iterate(1, 2, local_sizes=tuple(numbers), grain=numbers[0])
    assert next(batches).indices == (2, 3, 4, 5)


def test_steps_outside_of_a_job_are_refused() -> None:
    plan = ElasticBatches(20, 6, epochs=2).with_batch(4, after_step=2)
    assert (plan.first_step, plan.total_steps) == (2, 9)
    for step in (2, 10):
        with pytest.raises(ValueError, match="this job") as raised:
            plan.batch(step, 0, 1)
        assert str(raised.value) == f"step is {step}; this job has steps 3 to 9"
    assert [plan.batch(step, 0, 1).global_size for step in (3, 4, 5, 9)] == [4, 4, 4, 4]
    for step in (1, 10):
        with pytest.raises(ValueError, match="this job") as raised:
            plan.iterate(0, 1, step)
        assert str(raised.value) == (
            f"start_step is {step}, but this job has 9 steps and this plan begins after step 2; was its data changed?"
        )
    assert len(list(plan.iterate(0, 1, 9))) == 0
    with pytest.raises(ValueError, match="5 steps; was its data changed") as raised:
        ElasticBatches(30, 6).with_batch(6, after_step=6)
    assert str(raised.value) == "start_step is 6, but this job has 5 steps; was its data changed?"


# -- the cache of batches ----------------------------------------------------------------------------------------------


def test_a_cached_batch_is_named_by_its_step_and_place_and_keyed_by_the_data(tmp_path: Path) -> None:
    plan = ElasticBatches(20, 6, seed=3)
    cache = BatchCache(tmp_path, prefetch=1, lookback=0, version="v7")

    def load(batch: Batch) -> torch.Tensor:
        return torch.tensor(batch.indices)

    batches = cache.iterate(plan, load, rank=1, world_size=2, start_step=1)
    next(batches)
    name = tmp_path / "batch-000000002-9-3.tensors"
    assert cache.path(plan.batch(2, 1, 2)) == name
    raw = name.read_bytes()
    header = json.loads(raw[20 : 20 + int.from_bytes(raw[8:12], "little")])
    source = MapSource(20, 3).describe()
    assert header["key"] == hashlib.sha256(json.dumps([source, "v7"]).encode()).hexdigest()
    assert (tmp_path / "loader.lock").stat().st_mode & 0o777 & ~0o022 == 0o644 & ~0o022
    batches.close()  # type: ignore[attr-defined]


def test_only_batches_outside_of_the_window_are_removed(tmp_path: Path) -> None:
    cache = BatchCache(tmp_path)
    assert cache.window(7) == (5, 17)
    names = [f"batch-{step:09d}-0-1.tensors" for step in (4, 5, 17, 18)]
    others = ["batch-1-0-1.tensors.old", "notes", "x.tmp"]
    for name in (*names, *others):
        (tmp_path / name).touch()
    cache.remove_outside(*cache.window(7))
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:3], *others}
    cache.remove_unfinished()
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:3], *others[:2]}


def test_pauses_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("elastipod.data.batch_cache.time.sleep", sleep)
    monkeypatch.setattr("elastipod.data.batch_cache.time.monotonic", lambda: now[0])
    assert len(list(batch_cache._pauses(0.06))) == len(slept) + 1
    assert slept == [0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.02, 0.02]
    slept.clear()
    assert len(list(batch_cache._pauses(0.0))) == 1
    assert slept == []


@pytest.mark.parametrize(("prefetch", "lookback"), [(-1, 2), (0, -1)])
def test_lengths_below_zero_are_refused_with_both(tmp_path: Path, prefetch: int, lookback: int) -> None:
    BatchCache(tmp_path, prefetch=0, lookback=0)
    with pytest.raises(ValueError, match="at least 0") as raised:
        BatchCache(tmp_path, prefetch=prefetch, lookback=lookback)
    assert str(raised.value) == f"prefetch is {prefetch} and lookback {lookback}; both must be at least 0"


# -- shards ------------------------------------------------------------------------------------------------------------


class Opened:
    """Opens shards of numbers and notes what is opened and closed."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, shard: int, first: int) -> Iterator[int]:
        self.calls.append(("open", shard, first))
        return self._samples(shard, first)

    def _samples(self, shard: int, first: int) -> Iterator[int]:
        try:
            while True:
                yield 1000 * shard + first
                first += 1
        finally:
            self.calls.append(("close", shard))


def test_a_reader_keeps_at_least_one_shard_open() -> None:
    with pytest.raises(ValueError, match=r"^max_open is 0; it must be at least 1$"):
        ShardReader(Shards([9], lanes=1), lambda shard, first: [], max_open=0)


def test_a_shard_is_opened_again_where_it_is_not_near() -> None:
    opened = Opened()
    reader = ShardReader(Shards([200, 200], lanes=1), opened)
    assert [reader[place] for place in (3, 4, 69)] == [3, 4, 69], "64 samples are read over"
    assert opened.calls == [("open", 0, 3)]
    assert reader[135] == 135, "65 are not"
    assert reader[134] == 134, "and none is read twice"
    assert opened.calls == [("open", 0, 3), ("close", 0), ("open", 0, 135), ("close", 0), ("open", 0, 134)]
    assert reader.__getitems__([335, 200]) == [1135, 1000]
    reader.close()
    reader.close()
    assert sorted(opened.calls[5:]) == [("close", 0), ("close", 1), ("close", 1), ("open", 1, 0), ("open", 1, 135)]


def test_the_shard_that_was_not_used_for_longest_is_closed() -> None:
    opened = Opened()
    reader = ShardReader(Shards([9] * 4, lanes=1), opened, max_open=2)
    for index in (0, 9, 1, 18):
        assert reader[index] == 1000 * (index // 9) + index % 9
    assert opened.calls == [("open", 0, 0), ("open", 1, 0), ("close", 1), ("open", 2, 0)]


def test_places_outside_of_shards_are_named() -> None:
    found = Shards([2, 0, 3], lanes=2)
    assert [found.locate(index) for index in range(5)] == [(0, 0), (0, 1), (2, 0), (2, 1), (2, 2)]
    for index in (-1, 5):
        with pytest.raises(IndexError) as raised:
            found.locate(index)
        assert str(raised.value) == f"sample {index} is outside of 5 samples"
        with pytest.raises(IndexError) as raised:
            found.order(0)[index]
        assert str(raised.value) == f"position {index} is outside an epoch of 5 samples"
    reader: ShardReader[int] = ShardReader(found, lambda shard, first: iter([7]))
    assert reader[2] == 7
    with pytest.raises(DataError) as short:
        reader[3]
    assert str(short.value) == "shard 2 ends before its sample 1, but it was said to have 3"
    assert len(reader) == len(found) == 5


@pytest.mark.parametrize(
    ("lengths", "options", "told"),
    [
        ([3, "x"], {"lanes": 1}, "the length of shard 1 is 'x'; it must be a whole number"),
        ([3], {"lanes": 1.5}, "lanes is 1.5; it must be a whole number"),
        ([3], {"lanes": 1, "seed": "s"}, "seed is 's'; it must be a whole number"),
    ],
)
def test_numbers_of_shards_are_named(lengths: list[Any], options: dict[str, Any], told: str) -> None:
    with pytest.raises(TypeError) as raised:
        Shards(lengths, **options)
    assert str(raised.value) == told


def test_an_index_of_shards_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "index.json"

    def open_shard(shard: int, first: int) -> range:
        assert first == 0
        return range(shard + 2)

    for text, told in (
        ("[1]", "is not an index of shards: it has no list of lengths"),
        ('{"lengths": 3}', "is not an index of shards: it has no list of lengths"),
        ('{"lengths": [1.5, 2]}', "is not an index of shards: it has no list of lengths"),
        ('{"lengths": [1]}', "counts 1 shards, but there are 2; remove it to count again"),
        ("no", "is not an index of shards: Expecting value: line 1 column 1 (char 0)"),
    ):
        path.write_text(text)
        with pytest.raises(DataError) as raised:
            shard_lengths(open_shard, 2, path)
        assert str(raised.value) == f"{path} {told}"
    path.unlink()
    shown: list[str] = []
    replace = os.replace

    def noted(source: Path, target: Path) -> None:
        shown.append(source.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    assert shard_lengths(open_shard, 2, path) == [2, 3]
    assert shown == [f"index.json.{socket.gethostname()}.{os.getpid()}.tmp"]
    path.unlink()
    path.mkdir()
    with pytest.raises(DataError) as raised:
        shard_lengths(open_shard, 2, path)
    assert str(raised.value) == f"cannot read the index of shards {path}: Is a directory"
    path.rmdir()

    def made_meanwhile(shard: int, first: int) -> list[int]:
        path.mkdir()
        return [1]

    with pytest.raises(DataError) as raised:
        shard_lengths(made_meanwhile, 1, path)
    assert str(raised.value) == f"cannot write the index of shards {path}: Is a directory"
    assert list(tmp_path.iterdir()) == [path]
