"""Copies of shards on other ranks: who holds them, within which budget, when they are made, and what they hold."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.nonempty import some
from tests.unit.in_memory.forked_ranks import run_ranks, world

from elastipod.checkpoint.collective_planning import DOMAIN_ENV
from elastipod.in_memory import shard_copies
from elastipod.in_memory.contiguous_image import ContiguousImage, contiguous_image, room_beside
from elastipod.in_memory.members import Members, TensorShape
from elastipod.in_memory.parts import PartContent, ShardedShape, part_of
from elastipod.in_memory.shard_copies import Copies, ShardCopies, agree_on_flag, exchange_parts

ROWS = 7  # of a tensor: no two parts of three are of one length with those of two
SHAPES = (
    ShardedShape(TensorShape("model.w", "float32", (ROWS, 2)), 0),
    ShardedShape(TensorShape("model.v", "int64", (2, ROWS)), 1),
    ShardedShape(TensorShape("step", "float64", ()), None),
)
BYTES = [3 * (8 + 16) + 8, 3 * (8 + 16) + 8, 1 * (8 + 16) + 8]  # of each of three parts
MEMBERS: Any = None


def no_progress() -> None:
    """Let it be."""


def whole(shape: ShardedShape) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, shape.whole.dtype)
    return torch.arange(torch.Size(shape.whole.sizes).numel()).reshape(shape.whole.sizes).to(dtype)


def content(_: Members | None, part: int) -> PartContent:
    """Give a part of tensors whose numbers tell their place."""
    tensors = {}
    for shape in SHAPES:
        tensors[shape.key] = whole(shape)
        if shape.dim is not None:
            start, stop = shape.rows(part)
            tensors[shape.key] = tensors[shape.key].narrow(shape.dim, start, stop - start).contiguous()
    return PartContent(part, SHAPES, tensors, "the values")


def said_by(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class World:
    """What one rank of three hears from the others: the nodes and domains of all ranks, and the bytes that they need."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rank: int, places: list[list[str]], needs: list[int]) -> None:
        self.told: list[str] = []
        self._answers = [[json.dumps(place) for place in places], [str(need) for need in needs]]
        monkeypatch.setattr(shard_copies, "part_content", content)
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
def test_a_rank_says_where_it_is_and_what_it_would_hold(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv(DOMAIN_ENV, "rack")
    heard = World(monkeypatch, rank, NODES, NEEDS)
    copies = ShardCopies(Copies(max(NEEDS)))
    assert copies._choose_holders(MEMBERS, part_of(3, rank)) == {0: 1, 1: 2, 2: 0}
    assert heard.told == ['["host rack", "rack"]', str(NEEDS[rank])]


def test_without_a_domain_the_host_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DOMAIN_ENV, raising=False)
    heard = World(monkeypatch, 0, NODES, NEEDS)
    ShardCopies(Copies(max(NEEDS)))._choose_holders(MEMBERS, part_of(3, 0))
    assert heard.told[0] == '["host ", ""]'


def test_a_copy_goes_to_another_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    World(monkeypatch, 0, [["a", "x"], ["b", "x"], ["c", "y"]], NEEDS)
    holders = ShardCopies(Copies(max(NEEDS)))._choose_holders(MEMBERS, part_of(3, 0))
    assert holders == {0: 2, 1: 2, 2: 0}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("places", "budget", "said"),
    [
        ([["a", "x"]] * 3, 10**6, "all ranks are on one node"),
        (NODES, NEEDS[0] - 1, f"they would take {NEEDS[1]} bytes on rank 1, and memory_bytes is {NEEDS[0] - 1}"),
        (NODES, max(NEEDS) - 1, f"they would take {NEEDS[1]} bytes on rank 1, and memory_bytes is {max(NEEDS) - 1}"),
    ],
)
def test_where_there_can_be_none_one_rank_says_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    rank: int,
    places: list[list[str]],
    budget: int,
    said: str,
) -> None:
    World(monkeypatch, rank, places, NEEDS)
    assert ShardCopies(Copies(budget))._choose_holders(MEMBERS, part_of(3, rank)) == {}
    assert said_by(caplog) == [f"there are no copies of shards in this world: {said}"] * (rank == 0)


def test_replicas_are_copies_already(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    heard = World(monkeypatch, 0, [["a", ""], ["b", ""], ["c", ""], ["d", ""]], [])
    assert ShardCopies(Copies(1))._choose_holders(MEMBERS, part_of(2, 0)) == {}
    assert (heard.told, said_by(caplog)) == ([], [])


# ---- when


class Taking:
    """Rank 1 of a world in which nothing travels; `asked` is what was to travel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holders: dict[int, int], every: int) -> None:
        self.copies = ShardCopies(Copies(1, every=every))
        self.asked: list[Any] = []
        self.chosen = 0
        self.rooms: list[int] = []
        monkeypatch.setattr(shard_copies, "part_content", lambda members, part, *_: content(members, part))
        monkeypatch.setattr(shard_copies, "_exchange_images", self._exchange)
        monkeypatch.setattr(self.copies, "_choose_holders", lambda *_: self._choose(holders))

    def _choose(self, holders: dict[int, int]) -> dict[int, int]:
        self.chosen += 1
        return holders

    def _exchange(self, own: ContiguousImage, *more: Any) -> list[str]:
        self.asked.append((own.content.part, *more))
        return ["that of another"]

    def take(self, *steps: int) -> list[int]:
        """Give the steps of which there are images."""
        return [
            step for step in steps if self.copies.take(step, MEMBERS, part_of(3, 1), no_progress, self.rooms.append)
        ]


HOLDERS = {0: 1, 1: 2, 2: 0}


def test_the_first_step_of_a_world_is_copied_and_then_each_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    taking = Taking(monkeypatch, HOLDERS, 3)
    assert taking.take(4, 5, 6, 7, 8, 9) == [4, 6, 9]
    assert taking.chosen == 1
    taking.copies.forget_world()
    assert taking.take(10, 11, 12) == [10, 12]
    assert taking.chosen == 2
    assert taking.copies._complete == {4, 6, 9, 10, 12}
    assert taking.rooms == [1 - (BYTES[1] + BYTES[0])] * 2, "beside the first of each world: what the budget leaves"


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

    monkeypatch.setattr(shard_copies, "_exchange_images", broken)
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
    after = contiguous_image(before).content
    for tensor in before.tensors.values():
        tensor.add_(1)
    for key, tensor in after.tensors.items():
        assert torch.equal(tensor, before.tensors[key] - 1)
    assert (after.part, after.shapes, after.values) == (before.part, SHAPES, "the values")
    assert after.num_bytes == before.num_bytes == BYTES[0]


# ---- second holders, when ranks leave


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_enough", [True, False])
def test_a_part_that_one_rank_would_hold_alone_gets_a_second_holder_within_the_budget(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, is_enough: bool
) -> None:
    """Rank 2 leaves and gives its part to rank 1."""
    older = [0, 100, 10**6]  # what the one that leaves holds does not count
    World(monkeypatch, rank, NODES, [])._answers = [[str(each) for each in older]]
    holders = [(part_of(3, 0), 0), (part_of(3, 1), 1), (part_of(3, 2), 1)]
    need = 100 + sum(BYTES)  # each of the two then has all three parts
    copies = ShardCopies(Copies(need if is_enough else need - 1))
    found = copies.second_holders(holders, [0, 1], MEMBERS, part_of(3, rank), older[rank])
    assert found == ({part_of(3, 0): 1, part_of(3, 1): 0, part_of(3, 2): 0} if is_enough else {})
    says = f"those who stay would hold {need} bytes each, and memory_bytes is {need - 1}"
    assert [says in text for text in said_by(caplog)] == [True] * (rank == 0 and not is_enough)


def test_nobody_wants_second_holders_without_copies() -> None:
    assert ShardCopies(None).second_holders([(1, 0)], [0, 1], MEMBERS, 1, 0) == {}


# ---- the exchange itself


def run_world(size: int, body: Callable[[int], Any]) -> list[Any]:
    port = free_port()

    def rank_body(rank: int) -> Any:
        with world(rank, size, port):
            return body(rank)

    return run_ranks(size, rank_body)


def test_parts_arrive_whole_and_only_where_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes two parts at once, rank 0 one, rank 2 none; the part of rank 1 stays where it is."""
    monkeypatch.setattr(shard_copies, "part_content", content)
    takers = {part_of(3, 0): 1, part_of(3, 2): 1, part_of(3, 1): 0}
    givers = {part_of(3, index): index for index in range(3)}

    def body(rank: int) -> Any:
        told: list[int] = []
        taken = exchange_parts(MEMBERS, part_of(3, rank), takers, givers, lambda: told.append(1))
        agree_on_flag()
        found = []
        for image in taken:
            wanted = content(None, image.part)
            is_right = [torch.equal(tensor, wanted.tensors[key]) for key, tensor in image.tensors.items()]
            found.append([image.part, is_right, image.shapes == SHAPES, image.values])
        return [found, len(told)]

    right = [[True] * 3, True, "the values"]
    assert run_world(3, body) == [
        [[[part_of(3, 1), *right]], 2],
        [[[part_of(3, 0), *right], [part_of(3, 2), *right]], 3],
        [[], 1],
    ]


@pytest.mark.parametrize("size", [3, 8], ids=["parts of two lengths", "a part without rows"])
def test_copies_arrive_whole_where_they_are_held(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Each rank holds the part of the rank before it; rank 0 also that of rank 1, and rank 2 none."""
    monkeypatch.setattr(shard_copies, "MESSAGE_BYTES", 40)
    monkeypatch.setattr(shard_copies, "part_content", lambda members, part, *_: content(members, part))
    holders = {rank: (rank + 1) % size for rank in range(size)} | {1: 0}
    monkeypatch.setattr(ShardCopies, "_choose_holders", lambda *_: holders)

    def body(rank: int) -> Any:
        told: list[int] = []
        images = ShardCopies(Copies(1)).take(4, MEMBERS, part_of(size, rank), lambda: told.append(1), lambda _: None)
        agree_on_flag()
        found = []
        for image in images:
            wanted = content(None, image.part)
            is_right = [torch.equal(tensor, wanted.tensors[key]) for key, tensor in image.tensors.items()]
            found.append([image.part, is_right, image.shapes == SHAPES, image.values, list(image.tensors)])
        return [found, len(told)]

    def num_messages(rank: int) -> int:
        stretches = [shape.stretch(part_of(size, rank)) for shape in SHAPES if shape.dim is not None]
        return -(-sum(-(-(stop - start) // 16) * 16 for start, stop in stretches) // 40)

    for rank, (found, num_told) in enumerate(some(run_world(size, body))):
        held = [rank, *(giver for giver, holder in holders.items() if holder == rank)]
        right = [[True] * 3, True, "the values", [shape.key for shape in SHAPES]]
        assert found == [[part_of(size, each), *right] for each in held]
        assert num_told == sum(map(num_messages, held))


def test_an_image_and_those_beside_it_share_what_every_rank_has_whole() -> None:
    own = contiguous_image(content(None, part_of(3, 0)))
    other = room_beside(own.content, part_of(3, 2))
    assert other.content.tensors["step"] is own.content.tensors["step"]
    assert {tensor.untyped_storage().data_ptr() for key, tensor in own.content.tensors.items() if key != "step"} == {
        own.raw.untyped_storage().data_ptr()
    }, "one stretch of memory"
    first, second = (own.content.tensors[shape.key].data_ptr() for shape in SHAPES if shape.dim is not None)
    assert second - first == 32, "24 bytes, and those up to the next number of any size"


def test_a_flag_of_a_single_rank_needs_nobody() -> None:
    assert not dist.is_initialized()
    agree_on_flag()


def test_a_flag_waits_for_every_rank() -> None:
    def body(rank: int) -> Any:
        summed: list[list[float]] = []
        reduce: Any = dist.all_reduce

        def noting(tensor: torch.Tensor) -> None:
            summed.append(tensor.tolist())
            reduce(tensor)

        dist.all_reduce = noting  # type: ignore[assignment]
        agree_on_flag()
        return summed

    assert run_world(2, body) == [[[0]]] * 2
