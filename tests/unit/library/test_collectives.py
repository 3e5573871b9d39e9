"""What a rank tells the others as JSON, and what it makes of their answers, with the other ranks played."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elastipod.collectives import (
    all_gather_json,
    all_gather_texts,
    capture_outcome,
    sum_over_ranks,
    unwrap_outcome,
)
from elastipod.errors import CheckpointError, FencedError
from elastipod.message_slots import BODY_BYTES, SLOT_BYTES, slot_of

GROUP: Any = object()


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Play the other ranks, which say these texts. Gives the groups whose collectives were used."""

    def play(*texts: str) -> list[Any]:
        used: list[Any] = []

        def all_gather(into: torch.Tensor, own: torch.Tensor, group: Any = None) -> None:
            used.append(group)
            first, *others = into.view(1 + len(texts), len(own))
            first.copy_(own)
            for part, text in zip(others, texts, strict=True):
                sent = slot_of(text.encode()) if len(own) == SLOT_BYTES else text.encode()[BODY_BYTES:]
                part.copy_(torch.tensor(list(sent.ljust(len(own), b"\0")), dtype=torch.uint8))

        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 1 + len(texts))
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
        monkeypatch.setattr(dist, "all_gather_into_tensor", all_gather)
        return used

    return play


def test_texts_of_any_length_arrive_by_rank_over_the_group_that_is_named(peers: Callable[..., list[Any]]) -> None:
    used = peers("größer als die anderen", "x")
    assert all_gather_texts("own", GROUP) == ["own", "größer als die anderen", "x"]
    assert used == [GROUP], "short ones travel at once"
    for length in (BODY_BYTES - 1, BODY_BYTES, BODY_BYTES + 1, 5000):
        long = "a" * (length - 2) + "ü"  # which may be divided
        used = peers(long, "x")
        assert all_gather_texts("own", GROUP) == ["own", long, "x"]
        assert used == [GROUP] * (2 if length > BODY_BYTES else 1)
        peers("short", "")
        assert all_gather_texts(long, GROUP) == [long, "short", ""]


def test_a_size_that_a_rank_must_not_send_is_refused_before_the_text_is_sent(peers: Callable[..., list[Any]]) -> None:
    used = peers("four", "1234567")
    seen: list[int] = []

    def check(size: int) -> None:
        seen.append(size)
        if size > 4:
            raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        all_gather_texts("own", check_size=check)
    assert (seen, used) == ([3, 4, 7], [None])


def test_values_of_all_ranks_are_json_in_rank_order(peers: Callable[..., list[Any]]) -> None:
    used = peers('{"value": [1, null]}')
    assert all_gather_json(lambda: {"ü": 2.5}, GROUP) == [{"ü": 2.5}, [1, None]]
    assert used == [GROUP]


def test_the_failure_of_another_rank_is_raised_with_its_number(peers: Callable[..., list[Any]]) -> None:
    peers('{"value": 1}', '{"failed": "no space"}', '{"failed": "later"}')
    with pytest.raises(CheckpointError, match=r"^rank 2: no space$"):
        all_gather_json(lambda: 1)
    peers('{"fenced": "generation 4 has taken over"}')
    with pytest.raises(FencedError, match=r"^generation 4 has taken over$"):
        all_gather_json(lambda: 1)


def test_a_rank_that_fails_still_answers_the_others(peers: Callable[..., list[Any]]) -> None:
    used = peers('{"value": 1}')

    def fail() -> int:
        raise OSError("disk")

    with pytest.raises(CheckpointError, match=r"^rank 0: disk$"):
        all_gather_json(fail)
    assert len(used) == 1


def test_a_single_process_needs_no_group() -> None:
    assert all_gather_json(lambda: [1]) == [[1]]
    assert sum_over_ranks(0.1) == 0.1
    with pytest.raises(CheckpointError, match=r"^rank 0: ValueError: odd$"):
        all_gather_json(raise_odd)


def raise_odd() -> bool:
    raise ValueError("odd")


def test_a_sum_over_ranks_keeps_the_digits_of_float64(
    peers: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    peers("another rank")
    monkeypatch.setattr(dist, "all_reduce", lambda total: total.add_(1e-12))
    assert sum_over_ranks(1.0) == 1.0 + 1e-12


def test_outcomes_have_the_keys_that_other_ranks_read(caplog: pytest.LogCaptureFixture) -> None:
    def fenced() -> None:
        raise FencedError("replaced")

    def failed() -> None:
        raise CheckpointError("full")

    assert capture_outcome(lambda: None) == {"value": None}
    assert capture_outcome(fenced) == {"fenced": "replaced"}
    assert capture_outcome(failed) == {"failed": "full"}
    assert caplog.records == []  # their text says all
    with caplog.at_level(logging.ERROR):
        assert capture_outcome(raise_odd) == {"failed": "ValueError: odd"}
    (record,) = caplog.records
    assert record.getMessage() == "this rank failed"
    assert record.exc_info  # a mistake of the program: its place is in the log of this rank
    with pytest.raises(CheckpointError, match=r"^full$"):
        unwrap_outcome({"failed": "full"})
