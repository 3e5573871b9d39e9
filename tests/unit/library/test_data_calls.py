"""What the data layer asks of orders, shards, files and folders: how often, with what names, and up to which bound."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from elastipod.data import batch_cache, elastic_batches, shards, token_format, tokenizing, tokens_command
from elastipod.data.batch_cache import BatchCache
from elastipod.data.elastic_batches import Batch, ElasticBatches
from elastipod.data.loader import ElasticBatchSampler, ElasticLoader
from elastipod.data.shards import ShardReader, Shards, shard_lengths
from elastipod.data.sources import MapSource
from elastipod.data.token_format import TokenHeader, bytes_per_token, verify_tokens
from elastipod.data.tokenizing import BlockTokenizer, TextBlock
from elastipod.data.tokens import TokenFile, TokenWindows
from elastipod.errors import DataError
from elastipod.rank_in_world import RankInWorld
from elastipod.shuffle import splitmix64

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
    with pytest.raises(DataError) as raised:
        shards._write_index(path, [1])
    assert str(raised.value) == f"cannot write the index of shards {path}: Is a directory"
    assert list(tmp_path.iterdir()) == [path]


# -- loading -----------------------------------------------------------------------------------------------------------


def test_a_loader_gives_the_part_of_its_rank_with_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def noted(dataset: Any, **options: Any) -> Any:
        asked.append(options)
        return DataLoader(dataset, **options)

    monkeypatch.setattr("elastipod.data.loader.DataLoader", noted)
    plan = ElasticBatches(20, 4, seed=3)
    torch.manual_seed(77)
    dataset: Any = list(range(100, 120))
    loader: ElasticLoader[list[int]] = ElasticLoader(
        dataset,
        plan,
        rank=1,
        world_size=2,
        micro_batch=2,
        start_step=2,
        local_sizes=(1, 3),
        collate_fn=list,
    )
    assert (loader.step, loader.total_steps, loader.prefetched) == (2, 5, 0)
    found = []
    for batch, passes in loader:
        for part, data in passes:
            found.append((batch.step, data, part.is_last, loader.step))
            assert data == [100 + index for index in part.indices]
    wanted = [batch for batch in plan.iterate(1, 2, 2, local_sizes=(1, 3))]
    assert [(step, len(data), is_last, at) for step, data, is_last, at in found] == [
        (3, 2, False, 2), (3, 1, True, 3), (4, 2, False, 3), (4, 1, True, 4), (5, 2, False, 4), (5, 1, True, 5),
    ]  # fmt: skip
    assert [index for _, data, *_ in found for index in data] == [
        100 + each for batch in wanted for each in batch.indices
    ]
    (options,) = asked
    assert options["generator"].initial_seed() == splitmix64(splitmix64(splitmix64(77) ^ 2) ^ 1)
    assert {name for name in options} == {"batch_sampler", "generator", "collate_fn"}
    assert loader.state_dict() == plan.state_dict(5)


def test_samples_that_are_fetched_and_not_taken_are_counted() -> None:
    plan = ElasticBatches(12, 4, shuffle=False)
    loader: ElasticLoader[Any] = ElasticLoader(list(range(12)), plan, rank=0, world_size=1, micro_batch=2)  # type: ignore[arg-type]
    batches = iter(loader)
    _, passes = next(batches)
    assert loader.prefetched == 0
    next(passes)
    assert (loader.prefetched, loader.step) == (0, 0)
    with pytest.raises(DataError) as late:
        loader.load_state_dict(plan.state_dict(0))
    assert str(late.value) == "a data position can be loaded before the first batch only; make a new loader"
    loader.close()
    with pytest.raises(DataError) as over:
        next(passes)
    assert str(over.value) == (
        "step 1 belongs to an iteration that has ended; take all passes of a batch before the next one"
    )
    loader.load_state_dict(plan.state_dict(2))
    assert [batch.step for batch, _ in loader] == [3]


def test_a_sampler_says_where_it_begins_and_where_it_is() -> None:
    plan = ElasticBatches(12, 4, shuffle=False)
    sampler = ElasticBatchSampler(plan, rank=0, world_size=2, micro_batch=1, start_step=1)
    assert (sampler.state_dict(), sampler.state_dict(0)) == (plan.state_dict(1), plan.state_dict(0))
    assert sampler.total_steps == 3
    passes = iter(sampler)
    assert next(passes) == [4]
    assert (passes.step, passes.samples) == (1, 1)
    assert next(passes) == [5]
    assert (passes.step, passes.samples, passes.state_dict()) == (2, 2, plan.state_dict(2))
    passes.load_state_dict(plan.state_dict(0))
    assert (next(passes), passes.step) == ([0], 0)


# -- token files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [0, -3, (1 << 31) + 1])
def test_a_vocabulary_has_bounds(vocabulary: int) -> None:
    assert [bytes_per_token(each) for each in (1, 256, 257, 1 << 16, (1 << 16) + 1, 1 << 31)] == [1, 1, 2, 2, 4, 4]
    with pytest.raises(DataError) as raised:
        bytes_per_token(vocabulary)
    assert str(raised.value) == f"the vocabulary is {vocabulary}; it must be 1 to 2**31"


@pytest.fixture
def ten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ten tokens, of which a few are read at once."""
    monkeypatch.setattr(token_format, "_CHUNK", 3)
    (tmp_path / "text").write_bytes(bytes(range(10)))
    tokens_command.build(tmp_path / "ten", [tmp_path / "text"])
    return tmp_path / "ten"


def test_all_tokens_are_verified(ten: Path) -> None:
    assert (verify_tokens(ten).tokens, verify_tokens(ten).documents) == (10, 1)
    ten.write_bytes(ten.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError) as raised:
        verify_tokens(ten)
    assert str(raised.value) == (
        f"the tokens in {ten} do not have the checksum of the header: the file is damaged; build it again"
    )


def test_tokens_are_read_within_the_file(ten: Path) -> None:
    file = TokenFile(ten)
    assert (file.read(0, 10).tolist(), file.read(10, 0).tolist(), file.read(8, 2).dtype) == (
        list(range(10)),
        [],
        torch.int64,
    )
    for first, count in ((-1, 1), (0, 11), (9, 2), (3, -1)):
        with pytest.raises(IndexError) as raised:
            file.read(first, count)
        assert str(raised.value) == f"tokens {first} to {first + count} are outside of the 10 tokens of {ten}"
    windows = TokenWindows(file, 3)
    assert (len(windows), windows[2].tolist()) == (3, [6, 7, 8, 9])
    assert windows.batch([2, 0]).tolist() == [[6, 7, 8, 9], [0, 1, 2, 3]]
    assert windows.batch([]).shape == (0, 4)
    for index in (-1, 3):
        with pytest.raises(IndexError) as raised:
            windows[index]
        assert str(raised.value) == f"window {index} is outside of 3 windows"
    for indices, told in (([0, 3], "window 3 or 0"), ([-1, 2], "window 2 or -1")):
        with pytest.raises(IndexError) as raised:
            windows.batch(indices)
        assert str(raised.value) == f"{told} is outside of 3 windows"
    assert len(TokenWindows(file, 9)) == 1
    with pytest.raises(DataError) as short:
        TokenWindows(file, 10)
    assert str(short.value) == f"{ten} has 10 tokens, not enough for one window of 10 and a target"
    with pytest.raises(ValueError, match="at least one") as none:
        TokenWindows(file, 0)
    assert str(none.value) == "seq_len is 0; a window holds at least one token"


def test_texts_are_read_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH_BYTES", 4)
    first, second = tmp_path / "a", tmp_path / "b"
    first.write_bytes(b"one\ntwo\nx")
    second.write_bytes(b"12345")

    def read(*, by_line: bool, whole: bool) -> list[tuple[str, bytes, bool, int]]:
        blocks = tokenizing.read_text_blocks([first, second], by_line=by_line, whole=whole)
        return [(block.path.name, block.data, block.is_end, block.bytes_read) for block in blocks]

    assert read(by_line=False, whole=False) == [
        ("a", b"one\n", False, 4), ("a", b"two\n", False, 8), ("a", b"x", False, 9), ("a", b"", True, 9),
        ("b", b"1234", False, 13), ("b", b"5", False, 14), ("b", b"", True, 14),
    ]  # fmt: skip
    assert read(by_line=False, whole=True) == [
        ("a", b"one\ntwo\nx", False, 9), ("a", b"", True, 9), ("b", b"12345", False, 14), ("b", b"", True, 14),
    ]  # fmt: skip
    for whole in (False, True):
        assert read(by_line=True, whole=whole) == [
            ("a", b"one\ntwo\n", False, 8), ("a", b"x", False, 9), ("b", b"12345", False, 14),
        ]  # fmt: skip
    blocks = [TextBlock(first, b"x" * size, False, 0) for size in (3, 1, 4, 2, 1)]
    assert [[len(each.data) for each in batch] for batch in tokenizing._batches(blocks)] == [[3, 1], [4], [2, 1]]


def test_lines_are_documents_without_their_ends() -> None:
    blocks = [TextBlock(Path("a"), b"ab\r\n\nc\n", False, 6), TextBlock(Path("a"), b"d", False, 7)]
    found = BlockTokenizer(None, 300, 299, True)(blocks)
    numbers = [*b"ab", 299, 299, *b"c", 299, *b"d", 299]
    assert found == tokenizing.TokenBlock(b"".join(each.to_bytes(2, "little") for each in numbers), 8, 4, 7)
    whole = BlockTokenizer(lambda text: [len(text)], 256, None, False)
    assert whole([TextBlock(Path("a"), "ü".encode(), False, 2), TextBlock(Path("a"), b"", True, 2)]) == (
        tokenizing.TokenBlock(b"\x01", 1, 1, 2)
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            [1.5],
            "the tokenizer gave something for a that is not a token: 'float' object cannot be interpreted as an integer",
        ),
        ([9, 10], "the tokenizer gave the token 10 for a, but the vocabulary is 10"),
        (
            [300],
            "the tokenizer gave something for a that is not a token: unsigned byte integer is greater than maximum",
        ),
    ],
)
def test_what_is_no_token_is_told(given: list[Any], told: str) -> None:
    with pytest.raises(DataError) as raised:
        BlockTokenizer(lambda text: given, 10, None, False)([TextBlock(Path("a"), b"x", True, 1)])
    assert str(raised.value) == told


def test_the_tokenizer_is_found_in_the_working_directory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a package of the same name is installed, and the path is as it was afterwards."""
    for folder, number in (("installed", 1), ("here", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tokenizer_of_mine.py").write_text(f"def split(text): return [{number}]\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    before = list(sys.path)
    found = tokens_command._NamedTokenizer("tokenizer_of_mine:split")
    assert (found("x"), found.__reduce__()) == ([2], (tokens_command._NamedTokenizer, ("tokenizer_of_mine:split",)))
    assert sys.path == before
    del sys.modules["tokenizer_of_mine"]
    with pytest.raises(DataError) as raised:
        tokens_command._NamedTokenizer("no_such_module_here:f")
    assert str(raised.value) == (
        "--tokenizer no_such_module_here:f cannot be loaded: No module named 'no_such_module_here'; give bytes or MODULE:FUNCTION"
    )
    assert sys.path == before


@pytest.mark.parametrize(
    ("is_terminal", "interval", "end"), [(True, 0.5, ("\r", "")), (False, 10.0, ("", "\n"))], ids=["terminal", "file"]
)
def test_progress_is_printed_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, interval: float, end: tuple[str, str]
) -> None:
    now = [50.0]

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr("elastipod.data.tokens_command.time.monotonic", lambda: now[0])
    line = tokens_command._ProgressLine(4_000_000)
    now[0] += interval - 0.25
    line(1, 1)
    assert screen.getvalue() == ""
    now[0] += 0.25
    line(1_000_000, 600)
    now[0] += interval / 2
    line(2_000_000, 900)
    now[0] += interval / 2
    line(3_000_000, 1800)
    rates = (600 / interval, 1800 / (2 * interval))
    assert screen.getvalue() == (
        f"{end[0]}25% of 4.0 MB, 600 tokens, {rates[0]:.0f}/s{end[1]}{end[0]}75% of 4.0 MB, 1800 tokens, {rates[1]:.0f}/s{end[1]}"
    )


def test_a_build_tells_what_it_read_and_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "_BATCH_BYTES", 4)
    (tmp_path / "a").write_bytes(b"123456")
    told: list[tuple[int, int]] = []
    header = tokens_command.build(tmp_path / "out", [tmp_path / "a"], on_progress=lambda *at: told.append(at))
    assert told == [(4, 4), (6, 6)]
    assert header == TokenHeader(1, 6, 256, 1, header.crc32)
    for options, text in (
        ({}, f"{tmp_path / 'out'} exists; name another file, or replace it with --force"),
        ({"replace": True, "workers": 0}, "workers is 0; it must be at least 1"),
        (
            {"replace": True, "end_of_document": 256},
            "the token 256 for ends of documents is not below the vocabulary of 256",
        ),
        (
            {"replace": True, "end_of_document": -1},
            "the token -1 for ends of documents is not below the vocabulary of 256",
        ),
    ):
        with pytest.raises(DataError) as raised:
            tokens_command.build(tmp_path / "out", [tmp_path / "a"], **options)  # type: ignore[arg-type]
        assert str(raised.value) == text
    assert tokens_command.build(tmp_path / "out", [tmp_path / "a"], replace=True, end_of_document=255).tokens == 7
