"""Which lines are worth a regular expression: nothing that matches may be left out."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastipod_agent.core.log_lines import MAX_LINE_BYTES, candidates
from elastipod_agent.core.log_literals import has_leading_wildcard, required_literals
from elastipod_agent.workers.linux import fast_find


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        pytest.param(r".*loss: (\d+\.\d+).*", [b"loss: "], id="the longest piece"),
        pytest.param(r"^\[Epoch 0 Batch \d+.*loss", [b"[Epoch 0 Batch "], id="behind an anchor"),
        pytest.param(r".*(CUDA error|NCCL error|Xid).*", [b"CUDA error", b"NCCL error", b"Xid"], id="one of several"),
        pytest.param(r"(?:step)+ done", [b" done"], id="a part that must come"),
        pytest.param(r"abcd?e", [b"abc"], id="a part that may come ends the piece"),
        pytest.param("größe", ["größe".encode()], id="as UTF-8"),
        pytest.param(r"(?i)error", None, id="case does not matter"),
        pytest.param(r"(?i:error) now", [b" now"], id="case does not matter in a part"),
        pytest.param(r"error|\d+", None, id="an alternative without a text"),
        pytest.param(r"(error)?", None, id="nothing is needed"),
        pytest.param(r"\d+ .*", None, id="too short"),
        pytest.param(r"(?!bad)\w+", None, id="what must not come"),
    ],
)
def test_required_literals(pattern: str, texts: list[bytes] | None) -> None:
    found = required_literals(pattern)
    assert (None if found is None else sorted(found)) == texts


def test_the_literals_of_several_patterns_are_those_of_any() -> None:
    assert required_literals("loss:", None, "training done") == (b"loss:", b"training done")
    assert required_literals("loss:", r"\d") is None


@pytest.mark.parametrize(
    ("pattern", "expected"), [(".*a", True), ("(?i).*a", True), ("a.*", False), (".*a|b", False), (".+a", False)]
)
def test_begins_anywhere(pattern: str, expected: bool) -> None:
    assert has_leading_wildcard(pattern) is expected


PATTERNS = [".*ab(a|b)c?", "abc|cab", "(abc)+", "a+bca", "(?:aab|bba)c*", "[ab]cab", "abc$", "^bca"]


@given(st.sampled_from(PATTERNS), st.lists(st.text("abc", max_size=12), min_size=1, max_size=12), st.booleans())
def test_no_line_that_matches_is_left_out(pattern: str, lines: list[str], is_fast: bool) -> None:
    block = "".join(f"{line}\n" for line in lines).encode()
    texts = required_literals(pattern)
    kept = candidates(block, texts, fast_find(block) if is_fast else block.find)
    matching = [line for line in lines if re.search(pattern, line)]
    assert [line for line in kept.decode().splitlines() if re.search(pattern, line)] == matching


TEXTS = st.text(st.sampled_from("ab\0é"), min_size=1, max_size=3).map(str.encode)


@given(st.lists(st.lists(st.binary(max_size=3) | TEXTS, max_size=9).map(b"".join), max_size=20), TEXTS)
def test_exactly_the_lines_with_the_text(lines: list[bytes], text: bytes) -> None:
    block = b"".join(line.replace(b"\n", b" ") + b"\n" for line in lines)
    ended = [line for line in re.split(rb"[\r\n]", block) if text in line]
    assert candidates(block, [text], fast_find(block)) == b"".join(line + b"\n" for line in ended)


def test_long_lines_are_cut() -> None:
    block = b"loss: " + b"x" * 9000 + b"\n" + b"y" * 9000 + b" loss: 1\n" + b"loss: end"
    kept = candidates(block, [b"loss: "], block.find)
    assert kept == (b"loss: " + b"x" * 9000)[:MAX_LINE_BYTES] + b"\nloss: end\n"


def test_lines_that_nearly_all_hold_the_text_are_not_picked_out() -> None:
    block = b"".join(b"loss: %d\n" % n for n in range(100)) + b"no\n"
    assert candidates(block, [b"loss: "], block.find) == block
    sparse = block[:200] + b"x" * 10_000 + b"\n" + block[200:]
    assert b"no" not in candidates(sparse, [b"loss: "], sparse.find)


@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n"])
def test_a_line_behind_a_long_progress_bar_is_found(end: bytes, is_fast: bool) -> None:
    bar = b"".join(b"%d of 1000%s" % (number, end) for number in range(1000))
    block = bar + b"NVRM: Xid 79" + end + bar + b"x" * MAX_LINE_BYTES + b"NVRM: Xid far into its line" + end
    found = candidates(block, [b"NVRM: Xid", b"Xid"], fast_find(block) if is_fast else block.find)
    assert found == b"NVRM: Xid 79\n"


def test_a_long_line_is_given_once_for_all_its_texts() -> None:
    block = b"first " + b"x" * 100 + b" second " + b"y" * 2 * MAX_LINE_BYTES + b" first\n"
    assert candidates(block, [b"first", b"second"], block.find) == block[:MAX_LINE_BYTES] + b"\n"


def test_many_hits_in_one_line_take_time_in_proportion() -> None:
    lengths: list[int] = []

    def find(text: bytes, start: int) -> int:
        lengths.append(start)
        return block.find(text, start)

    block = b"abc" * (1 << 18)
    candidates(block, [b"abc"], find)
    assert len(lengths) <= 2 + len(block) // MAX_LINE_BYTES, "what is beyond the limit is skipped in steps of it"
