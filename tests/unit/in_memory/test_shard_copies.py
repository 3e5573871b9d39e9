"""Copies of shards on other ranks: who holds them, within which budget, when they are made, and what they hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.unit.in_memory.some_parts import BYTES, ROWS, SHAPES, content, no_progress

from elastipod.checkpoint.collective_planning import DOMAIN_ENV
from elastipod.in_memory import shard_copies
from elastipod.in_memory.contiguous_image import ContiguousImage, contiguous_image
from elastipod.in_memory.members import TensorShape
from elastipod.in_memory.parts import PartContent, ShardedShape, part_of
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_copies import Copies, ShardCopies

MEMBERS: Any = None


def said_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class World:
    """What one rank of three hears from the others: the nodes and domains of all ranks, and the bytes that they need and may use."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        rank: int,
        places: list[list[str]],
        needs: list[int],
        budgets: Sequence[int] = (),
    ) -> None:
        self.told: list[str] = []
        self._answers = [[json.dumps(place) for place in places]]
        self._answers += [[json.dumps(each) for each in zip(needs, budgets, strict=True)]] if budgets else []
        exceeds = any(need > budget for need, budget in zip(needs, budgets, strict=False))
        monkeypatch.setattr(shard_copies, "any_raised", lambda *flags: [exceeds] * len(flags))
        monkeypatch.setattr(shard_copies, "live_part", content)
        monkeypatch.setattr(shard_copies, "all_texts", self._all_texts)
        monkeypatch.setattr(shard_copies, "host_identity", lambda: "host")
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: len(places))

    def _all_texts(self, text: str) -> list[str]:
        self.told.append(text)
        return self._answers[len(self.told) - 1]


NODES = [["a", ""], ["b", ""], ["c", ""]]
# Each holds a copy of the rank before it: two generations of its own part and of that one.
NEEDS = [2 * (BYTES[0] + BYTES[2]), 2 * (BYTES[1] + BYTES[0]), 2 * (BYTES[2] + BYTES[1])]


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_says_where_it_is(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv(DOMAIN_ENV, "rack")
    heard = World(monkeypatch, rank, NODES, NEEDS)
    assert ShardCopies(Copies(1))._choose_holders(part_of(3, rank)) == {0: 1, 1: 2, 2: 0}
    assert heard.told == ['["host rack", "rack"]']


def test_without_a_domain_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DOMAIN_ENV, raising=False)
    heard = World(monkeypatch, 0, NODES, NEEDS)
    ShardCopies(Copies(1))._choose_holders(part_of(3, 0))
    assert heard.told[0] == '["host ", ""]'


def test_a_copy_goes_to_another_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch, 0, [["a", "x"], ["b", "x"], ["c", "y"]], NEEDS)
    holders = ShardCopies(Copies(1))._choose_holders(part_of(3, 0))
    assert holders == {0: 2, 1: 2, 2: 0}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("places", "budgets", "said"),
    [
        ([["a", "x"]] * 3, (10**6,) * 3, "all ranks are on one node"),
        (NODES, (NEEDS[0] - 1,) * 3, f"they would take {NEEDS[1]} bytes on rank 1, and memory_bytes is {NEEDS[0] - 1}"),
        (
            NODES,
            (max(NEEDS) - 1,) * 3,
            f"they would take {NEEDS[1]} bytes on rank 1, and memory_bytes is {max(NEEDS) - 1}",
        ),
        (NODES, (10**6, 10**6, 99), f"they would take {NEEDS[2]} bytes on rank 2, and memory_bytes is 99"),
    ],
)
def test_where_there_can_be_none_one_rank_says_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    places: list[list[str]],
    budgets: tuple[int, ...],
    said: str,
) -> None:
    heard = World(monkeypatch, rank, places, NEEDS, budgets)
    copies, rooms = ShardCopies(Copies(budgets[rank])), list[int]()
    assert copies.take(4, MEMBERS, part_of(3, rank), no_progress, rooms.append) == []
    assert copies._holders == {}
    assert said_by(caplog) == [f"there are no copies of shards in this world: {said}"] * (rank == 0)
    is_full = "memory_bytes" in said
    assert heard.told[1:] == [json.dumps([NEEDS[rank], budgets[rank]])] * is_full
    assert copies.take(5, MEMBERS, part_of(3, rank), no_progress, rooms.append) == []
    assert rooms == []
    assert len(said_by(caplog)) == (rank == 0)


def test_replicas_are_copies_already(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    heard = World(monkeypatch, 0, [["a", ""], ["b", ""], ["c", ""], ["d", ""]], [])
    assert ShardCopies(Copies(1))._choose_holders(part_of(2, 0)) == {}
    assert (heard.told, said_by(caplog)) == ([], [])


# ---- when


class Taking:
    """Rank 1 of a world in which nothing travels; `asked` is what was to travel."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        holders: dict[int, int],
        every: int,
        bytes_per_s: int | None = None,
        budget: int = 10**6,
    ) -> None:
        self.now = 100.0
        self.copies = ShardCopies(Copies(budget, every=every, bytes_per_s=bytes_per_s), lambda: self.now)
        self.wrong: list[int] = []
        self.asked: list[Any] = []
        self.chosen = 0
        self.rooms: list[int] = []
        monkeypatch.setattr(shard_copies, "live_part", content)
        monkeypatch.setattr(shard_copies, "exchange_images", self._exchange)
        monkeypatch.setattr(self.copies, "_choose_holders", lambda *_: self._choose(holders))

    def _choose(self, holders: dict[int, int]) -> dict[int, int]:
        self.chosen += 1
        return holders

    def _exchange(self, own: ContiguousImage, *more: Any) -> tuple[list[str], list[int]]:
        self.asked.append((own.content.part, *more))
        return [] if self.wrong else ["that of another"], self.wrong

    def take(self, *steps: int) -> list[int]:
        """Give the steps of which there are images."""
        taken = []
        for step in steps:
            if self.copies.take(step, MEMBERS, part_of(3, 1), no_progress, self.rooms.append):
                self.copies.end(step)
                taken.append(step)
        return taken


HOLDERS = {0: 1, 1: 2, 2: 0}


def test_the_first_step_of_a_world_is_copied_and_then_each_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Taking(monkeypatch, HOLDERS, 3)
    assert taking.take(4, 5, 6, 7, 8, 9) == [4, 6, 9]
    assert taking.chosen == 1
    taking.copies.forget_world()
    assert taking.take(10, 11, 12) == [10, 12]
    assert taking.chosen == 2
    assert taking.copies._complete == {4, 6, 9, 10, 12}
    assert taking.rooms == [10**6 - (BYTES[1] + BYTES[0])] * 2, "beside the first of each world: what the budget leaves"


MOMENT = ShardedShape(TensorShape("optimizer.exp_avg", "float32", (ROWS, 2)), 0)


def grown(_: Any, part: int) -> PartContent:
    """Give a part that has another tensor of 8 bytes a row, as an optimizer makes it in its first step."""
    before = content(None, part)
    moment = torch.zeros(MOMENT.local_sizes(part))
    return replace(before, shapes=(*SHAPES, MOMENT), tensors={**before.tensors, MOMENT.key: moment})


GROWN = BYTES[1] + BYTES[0] + 2 * 3 * 8  # of rank 1: its own part and that of rank 0, of three rows each


@pytest.mark.parametrize("is_enough", [True, False])
def test_parts_that_grow_are_compared_with_the_budget_before_they_are_copied(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_enough: bool
) -> None:
    taking = Taking(monkeypatch, HOLDERS, 3, budget=2 * GROWN - (not is_enough))
    monkeypatch.setattr(shard_copies, "all_texts", lambda text: [text] * 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    assert taking.take(4, 6) == [4, 6]
    assert len(taking.rooms) == 1
    monkeypatch.setattr(shard_copies, "live_part", grown)
    assert taking.take(7, 8) == [], "no copy is due"
    images = RankState(images={6: frozenset({part_of(3, 1)})})
    if is_enough:
        assert taking.take(9, 12) == [9, 12]
        assert taking.rooms[1:] == [GROWN], "what the budget leaves beside larger ones"
        assert not said_by(caplog)
    else:
        assert taking.copies.newest(images) == 6
        assert taking.take(9, 12) == []
        assert len(taking.asked) == 2, "nothing travels"
        says = f"they would take {2 * GROWN} bytes on rank 0, and memory_bytes is {2 * GROWN - 1}"
        assert said_by(caplog) == [f"there are no more copies of shards in this world: {says}"]
        assert taking.copies.newest(images) is None, "the next commit drops what is held"
        assert taking.copies.newest(RankState()) is None
        assert not taking.copies.is_complete(6)
    taking.copies.forget_world()
    assert taking.take(13) == ([13] if is_enough else []), "the next world compares again"
    assert taking.chosen == 2


def test_a_rank_with_room_leaves_out_what_another_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Taking(monkeypatch, HOLDERS, 1)
    assert taking.take(4) == [4]
    monkeypatch.setattr(shard_copies, "any_raised", lambda *flags: [True])
    monkeypatch.setattr(shard_copies, "all_texts", lambda text: [text, "[9, 8]", text])
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert taking.copies.take(5, MEMBERS, part_of(3, 1), no_progress, taking.rooms.append) == []
    assert len(taking.asked) == len(taking.rooms) == 1


def test_what_is_exchanged_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Taking(monkeypatch, HOLDERS, 1)
    own, other = taking.copies.take(5, MEMBERS, part_of(3, 1), no_progress, taking.rooms.append)
    assert taking.asked == [(part_of(3, 1), HOLDERS, no_progress)]
    assert own.part == part_of(3, 1)
    assert str(other) == "that of another"


def test_a_copy_that_is_broken_off_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Taking(monkeypatch, HOLDERS, 1)

    def broken(*_: Any) -> None:
        raise RuntimeError("closed")

    monkeypatch.setattr(shard_copies, "exchange_images", broken)
    with pytest.raises(RuntimeError, match="closed"):
        taking.take(5)
    assert taking.copies._complete == set()


@pytest.mark.parametrize("holders", [{}, None])
def test_without_holders_or_a_wish_nothing_is_copied(
    monkeypatch: pytest.MonkeyPatch, holders: dict[int, int] | None
) -> None:
    taking = Taking(monkeypatch, {}, 1)
    if holders is None:
        taking.copies._wanted = None
    assert taking.take(1, 2) == []
    assert (taking.asked, taking.chosen, taking.copies._complete) == ([], int(holders is not None), set())


def test_a_copy_does_not_change_with_later_steps() -> None:
    before = content(None, part_of(3, 0))
    beats: list[str] = []
    after = contiguous_image(before, lambda: beats.append("one")).content
    assert len(beats) == len(SHAPES)
    for tensor in before.tensors.values():
        tensor.add_(1)
    for key, tensor in after.tensors.items():
        assert torch.equal(tensor, before.tensors[key] - 1)
    assert (after.part, after.shapes, after.values) == (before.part, SHAPES, "the values")
    assert after.num_bytes == before.num_bytes == BYTES[0]


def test_a_copy_that_arrived_wrong_is_said_and_does_not_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taking = Taking(monkeypatch, HOLDERS, 1)
    taking.take(4)
    taking.wrong = [0]
    (own,) = taking.copies.take(5, MEMBERS, part_of(3, 1), no_progress, taking.rooms.append)
    assert own.part == part_of(3, 1)
    (said,) = said_by(caplog)
    assert said.startswith("the copies of rank 0 of step 5 have arrived with other content than they were sent with")
    assert taking.copies.end(5) is False
    assert [taking.copies.is_complete(step) for step in (4, 5)] == [True, False]
    taking.wrong = []
    taking.take(6)
    assert taking.copies.is_complete(6)


def test_a_rank_that_hears_of_a_wrong_copy_counts_its_own_for_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Taking(monkeypatch, HOLDERS, 1)
    assert taking.copies.take(5, MEMBERS, part_of(3, 1), no_progress, taking.rooms.append)
    monkeypatch.setattr(shard_copies, "any_raised", lambda flag: [not flag])
    assert taking.copies.end(5) is False
    assert not taking.copies.is_complete(5)


def test_what_is_complete_is_forgotten_with_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Taking(monkeypatch, HOLDERS, 1)
    for step in range(4, 40):
        taking.take(step)
        images = {at: frozenset({part_of(3, 1)}) for at in (step - 1, step)}
        assert taking.copies.newest(RankState(images=images)) == step
    assert taking.copies._complete == {38, 39}


@pytest.mark.parametrize(("rank", "copied"), [(0, [1, 8, 16]), (1, [1, 2, 4, 6, 8, 10, 12, 14, 16])])
def test_copies_keep_to_a_rate_by_the_clock_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, rank: int, copied: list[int]
) -> None:
    """A copy of 80 bytes, with those between its tensors, takes 10 s at 8 bytes in a second; a step takes 1.5 s."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(shard_copies, "any_raised", lambda flag: [flag])
    taking = Taking(monkeypatch, HOLDERS, 2, bytes_per_s=8)
    found: list[int] = []
    for step in range(1, 17):
        taking.copies.is_postponed = taking.copies.comes_too_soon
        found += taking.take(step)
        taking.now += 1.5
    assert found == copied


def test_a_copy_that_rank_0_finds_too_soon_is_left_out_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Taking(monkeypatch, HOLDERS, 1)
    assert taking.take(1) == [1]
    taking.copies.is_postponed = True
    assert taking.take(2) == []
    taking.copies.is_postponed = False
    assert taking.take(3) == [3]


# ---- second holders, when ranks leave


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_enough", [True, False])
def test_a_part_that_one_rank_would_hold_alone_gets_a_second_holder_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, is_enough: bool
) -> None:
    """Rank 2 leaves and gives its part to rank 1. Each rank has a budget of its own, and all decide alike."""
    older = [0, 100, 10**6]  # what the one that leaves holds does not count
    holders = [(part_of(3, 0), 0), (part_of(3, 1), 1), (part_of(3, 2), 1)]
    need = 100 + sum(BYTES)  # each of the two then has all three parts
    budgets = [need + 50, need if is_enough else need - 1, 1]
    World(monkeypatch, rank, NODES, [])._answers = [[json.dumps(each) for each in zip(older, budgets, strict=True)]]
    copies = ShardCopies(Copies(budgets[rank]))
    found = copies.second_holders(holders, [0, 1], MEMBERS, part_of(3, rank), older[rank])
    assert found == ({part_of(3, 0): 1, part_of(3, 1): 0, part_of(3, 2): 0} if is_enough else {})
    says = f"rank 1 would hold {need} bytes, and its memory_bytes is {need - 1}"
    assert [says in text for text in said_by(caplog)] == [True] * (rank == 0 and not is_enough)


def test_nobody_wants_second_holders_without_copies() -> None:
    assert ShardCopies(None).second_holders([(1, 0)], [0, 1], MEMBERS, 1, 0) == {}
