"""The order of every kind of source, and what each rank gets of it: a running job resumes in it with any later version."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastipod.data import Batch, BatchSplit, ElasticBatches, tokens_command
from elastipod.data.loader import ElasticBatchSampler, ElasticLoader
from elastipod.data.mixture import Mixture
from elastipod.data.shards import ShardReader, Shards
from elastipod.data.sources import MapSource, Source
from elastipod.data.tokens import TokenFile, TokenWindows


def order(source: Source, epoch: int) -> list[int]:
    found = source.order(epoch)
    return [found[position] for position in range(len(source))]


SHARDS = Shards([3, 5, 0, 2, 4], lanes=2, seed=1)
MIXTURE = Mixture({"a": 5, "b": Shards([2, 2], lanes=1)}, {"a": 4, "b": 2}, samples=6, seed=3)


@pytest.mark.parametrize(
    ("source", "epoch", "wanted"),
    [
        (MapSource(6), 0, [0, 3, 1, 4, 2, 5]),
        (MapSource(6, seed=2), 1, [2, 0, 5, 1, 4, 3]),
        (MapSource(3, shuffle=False), 1, [0, 1, 2]),
        (SHARDS, 0, [3, 8, 4, 9, 5, 0, 6, 1, 7, 2, 10, 11, 12, 13]),
        (SHARDS, 1, [10, 8, 11, 9, 12, 0, 13, 1, 3, 2, 4, 5, 6, 7]),
        (Shards([3, 5, 0, 2, 4], lanes=3, shuffle=False), 0, [8, 3, 0, 9, 4, 1, 10, 5, 2, 11, 6, 12, 7, 13]),
        (Shards([3, 1], lanes=9), 0, [0, 3, 1, 2]),
        (MIXTURE, 0, [7, 0, 2, 4, 8, 1]),
        (MIXTURE, 1, [5, 3, 1, 3, 4, 6]),
        (MIXTURE, 2, [7, 0, 2, 2, 1, 8]),
    ],
)  # fmt: skip
def test_an_epoch_has_the_order_that_it_always_had(source: Source, epoch: int, wanted: list[int]) -> None:
    assert order(source, epoch) == wanted


def test_a_rank_has_the_batches_that_it_always_had() -> None:
    found = list(ElasticBatches(10, 4, seed=1, epochs=2).iterate(1, 3))
    assert found == [
        Batch(1, 0, (0,), 4, 4, 3, spare_index=0, first=1, largest_share=2),
        Batch(2, 0, (4,), 4, 8, 3, spare_index=4, first=1, largest_share=2),
        Batch(3, 0, (6,), 2, 10, 3, spare_index=6, first=0, largest_share=1),
        Batch(4, 1, (9,), 4, 14, 3, spare_index=9, first=1, largest_share=2),
        Batch(5, 1, (6,), 4, 18, 3, spare_index=6, first=1, largest_share=2),
        Batch(6, 1, (3,), 2, 20, 3, spare_index=3, first=0, largest_share=1),
    ]


def test_uneven_parts_have_passes_on_every_rank() -> None:
    (batch, *_) = ElasticBatches(10, 4, shuffle=False).iterate(1, 2, local_sizes=[3, 1])
    assert (batch.indices, batch.first, batch.largest_share, batch.weight) == ((3,), 3, 3, 0.5)
    one, two = batch.micro_batches(2)
    assert (one.indices, one.weight, one.is_last, one.rows) == ((3,), 0.5, False, slice(0, 1))
    assert (two.indices, two.weight, two.is_last, two.rows) == ((3,), 0.0, True, slice(0, 1))


@pytest.mark.parametrize(
    ("sizes", "size", "parts", "largest"),
    [
        ([4, 2, 6], 12, [(0, 4), (4, 6), (6, 12)], 6),
        ([4, 2, 6], 7, [(0, 2), (2, 4), (4, 7)], 3),
        ([4, 2, 6], 1, [(0, 0), (0, 0), (0, 1)], 1),
        ([], 12, [(0, 4), (4, 8), (8, 12)], 4),
        ([], 7, [(0, 2), (2, 4), (4, 7)], 3),
        ([], 1, [(0, 0), (0, 0), (0, 1)], 1),
    ],
)
def test_a_batch_is_divided_as_it_always_was(
    sizes: list[int], size: int, parts: list[tuple[int, int]], largest: int
) -> None:
    split = BatchSplit.of(3, sizes, 2)
    found = [split.part(size, rank) for rank in range(3)]
    assert [(part.start, part.stop) for part in found] == parts
    assert split.largest(size) == largest


ROWS: Any = range(40)
PLAN = ElasticBatches(40, 8, seed=1)


def test_a_loader_begins_after_the_step_that_it_is_given_and_goes_on_where_it_stopped() -> None:
    with ElasticLoader[torch.Tensor](ROWS, PLAN, rank=0, world_size=2, micro_batch=3, start_step=2) as loader:
        assert (loader.step, loader.prefetched) == (2, 0)
        batch, passes = next(iter(loader))
        assert [data.tolist() for _, data in passes] == [list(part.indices) for part in batch.micro_batches(3)]
        assert (batch, loader.step) == (PLAN.batch(3, 0, 2), 3)
        assert [batch.step for batch, _ in loader] == [4, 5]
        assert list(loader) == []
    sampler = ElasticBatchSampler(PLAN, rank=0, world_size=2, micro_batch=3, start_step=2)
    assert (sampler.state_dict(), sampler.total_steps) == (PLAN.state_dict(2), 5)
    assert sampler.state_dict(4) == PLAN.state_dict(4)
    passes_given = iter(sampler)
    assert next(passes_given) == list(PLAN.batch(3, 0, 2).indices[:3])
    assert passes_given.state_dict()["step"] == 2, "the step has another pass"
    sampler.load_state_dict(PLAN.state_dict(4))
    assert next(iter(sampler)) == list(PLAN.batch(5, 0, 2).indices[:3])


def test_a_reader_closes_the_shard_that_it_used_least_recently() -> None:
    events: list[tuple[str, int]] = []

    def read(shard: int, first: int) -> Iterator[int]:
        events.append(("open", shard))
        try:
            yield from range(first, 9)
        finally:
            events.append(("close", shard))

    reader = ShardReader(Shards([9, 9, 9], lanes=1), read, max_open=2)
    assert [reader[index] for index in (0, 9, 1, 18, 2, 10)] == [0, 0, 1, 0, 2, 1]
    assert events == [("open", 0), ("open", 1), ("close", 1), ("open", 2), ("close", 2), ("open", 1)]
    reader.close()
    assert sorted(events[6:]) == [("close", 0), ("close", 1)]
    assert len(reader) == 27


def test_windows_and_tokens_end_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(bytes(range(9)))
    tokens_command.build(tmp_path / "tokens", [tmp_path / "text"])
    file = TokenFile(str(tmp_path / "tokens"))
    assert [file.read(first, count).tolist() for first, count in ((0, 0), (9, 0), (7, 2))] == [[], [], [7, 8]]
    for first, count in ((-1, 1), (1, -1), (8, 2)):
        with pytest.raises(IndexError, match=f"^tokens {first} to {first + count} are outside of the 9 tokens of "):
            file.read(first, count)
    assert [len(TokenWindows(file, seq_len)) for seq_len in (1, 3, 4, 7, 8)] == [8, 2, 2, 1, 1]
    windows = pickle.loads(pickle.dumps(TokenWindows(file, 4)))
    assert windows.batch([1, 0]).tolist() == [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]]
    assert windows.batch([]).shape == (0, 5)
    for index in (-1, 2):
        with pytest.raises(IndexError, match=f"^window {index} is outside of 2 windows$"):
            windows[index]
        with pytest.raises(IndexError, match=r"is outside of 2 windows$"):
            windows.batch([0, index])
    with pytest.raises(ValueError, match=r"^seq_len is 0; a window holds at least one token$"):
        TokenWindows(file, 0)


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_long_build_tells_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    clock = [100.0]
    monkeypatch.setattr("elastipod.data.tokens_command.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    progress = tokens_command._ProgressLine(4_000_000)
    interval = 0.5 if is_terminal else 10.0
    for seconds, done in ((interval - 0.25, 1_000_000), (interval, 2_000_000), (interval + 0.25, 3_000_000)):
        clock[0] = 100.0 + seconds
        progress(done, 1000)
    clock[0] = 100.0 + 2 * interval
    progress(4_000_000, 3000)
    first, last = (f"{share} of 4.0 MB, {tokens} tokens, {rate}/s" for share, tokens, rate in rates(interval))
    assert capsys.readouterr().err == (f"\r{first}\r{last}" if is_terminal else f"{first}\n{last}\n")


def rates(interval: float) -> list[tuple[str, int, int]]:
    return [("50%", 1000, round(1000 / interval)), ("100%", 3000, round(3000 / (2 * interval)))]


def test_a_tokenizer_is_looked_for_in_the_working_folder_first_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("installed", "here"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "words_of_mine.py").write_text(f"def encode(text): return {list(folder.encode())}\n")
    (tmp_path / "text").write_text("any")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    before = list(sys.path)
    command = ["build", "../out", "../text", "--tokenizer=words_of_mine:encode", "--vocabulary=256"]
    assert tokens_command.main(command) == 0
    assert sys.path == before
    monkeypatch.delitem(sys.modules, "words_of_mine")
    assert TokenFile(tmp_path / "out").read(0, 4).tolist() == list(b"here")
    assert tokens_command.main(["show", "../out"]) == tokens_command.main(["show", "../out", "--verify"]) == 0
    said = "../out: 4 tokens of 1 bytes in 1 documents, vocabulary 256, "
    assert capsys.readouterr() == (f"{said}written\n{said}checksum not verified\n{said}checksum correct\n", "")
