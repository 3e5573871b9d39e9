"""Texts between ranks: everyone gets everyone's, in the order of ranks, and nothing that is too long is taken."""

from __future__ import annotations

from typing import Any

import pytest
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world

from elastipod.in_memory import exchange
from elastipod.in_memory.exchange import all_texts, text_of
from elastipod.message_slots import BODY_BYTES


def test_every_rank_gets_the_texts_of_all_by_rank_and_one_text_from_its_source() -> None:
    port = free_port()
    own = ["a", "größer als die anderen" * 100, "c" * BODY_BYTES]

    def body(rank: int) -> Any:
        with world(rank, 3, port):
            return [
                all_texts(own[rank]),
                text_of(1, own[1] if rank == 1 else None),
                text_of(2, own[2] if rank == 2 else None),
                text_of(0, own[0] if rank == 0 else None),
            ]

    assert run_ranks(3, body) == [[own, own[1], own[2], own[0]]] * 3


def test_a_process_without_a_group_is_its_own_world() -> None:
    assert all_texts("alone") == ["alone"]
    assert text_of(0, "alone") == "alone"
    with pytest.raises(AssertionError, match="a single process is the source"):
        text_of(0, None)


def test_texts_of_the_permitted_lengths_are_taken_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(exchange, "MAX_MANIFEST_BYTES", 4)

    def body(rank: int) -> Any:
        with world(rank, 1, port):
            return [
                all_texts("füß"[:3], 5), raised_by(lambda: all_texts("füß", 4)), raised_by(lambda: all_texts("", 4)),
                text_of(0, "four"), raised_by(lambda: text_of(0, "fives")),
            ]  # fmt: skip

    longer, empty = (["TextTooLong", f"a rank sends {size} bytes where 1 to 4 are taken"] for size in (5, 0))
    assert run_ranks(1, body) == [[["füß"], longer, empty, "four", longer]]


def test_a_text_that_is_announced_as_too_long_is_not_received() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, 2, port):
            if rank == 0:
                return raised_by(lambda: all_texts("no", 2000))
            return raised_by(lambda: all_texts("m" * 2001, 3000))[:1]

    found = run_ranks(2, body)
    assert found[0] == ["TextTooLong", "a rank sends 2001 bytes where 1 to 2000 are taken"]
    assert found[1] == ["RuntimeError"], "its peer has left"


def test_a_source_that_announces_too_much_is_not_listened_to(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()

    def body(rank: int) -> Any:
        monkeypatch.setattr(exchange, "MAX_MANIFEST_BYTES", 4 if rank else 100)
        with world(rank, 2, port):
            return raised_by(lambda: text_of(0, None if rank else "much more"))

    found = run_ranks(2, body)
    assert found[1] == ["TextTooLong", "a rank sends 9 bytes where 1 to 4 are taken"]
