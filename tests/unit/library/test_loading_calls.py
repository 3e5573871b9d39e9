"""What a loader and token files give, count and refuse, in whole sentences."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from elastipod.data import token_format, tokenizing, tokens_command
from elastipod.data.elastic_batches import ElasticBatches
from elastipod.data.loader import ElasticBatchSampler, ElasticLoader
from elastipod.data.token_format import TokenHeader, bytes_per_token, verify_tokens
from elastipod.data.tokenizing import BlockTokenizer, TextBlock
from elastipod.data.tokens import TokenFile, TokenWindows
from elastipod.errors import DataError
from elastipod.shuffle import splitmix64

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


@pytest.mark.parametrize("taken", [0, 1])
def test_a_loop_that_looks_ahead_is_told_that_it_would_train_nothing(taken: int) -> None:
    plan = ElasticBatches(12, 4, shuffle=False)
    loader: ElasticLoader[Any] = ElasticLoader(list(range(12)), plan, rank=0, world_size=1, micro_batch=2)  # type: ignore[arg-type]
    batches = iter(loader)
    _, passes = next(batches)
    for _ in range(taken):
        next(passes)
    _, following = next(batches)
    for _ in range(2):
        with pytest.raises(DataError) as ahead:
            next(passes)
    assert str(ahead.value) == (
        "the data of step 1 was skipped, because the next batch was taken first; take all passes of a batch before the next one"
    )
    assert [index for part, _ in following for index in part.indices] == [4, 5, 6, 7]
    next(batches)
    assert [*following] == [], "all of them were taken"


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
