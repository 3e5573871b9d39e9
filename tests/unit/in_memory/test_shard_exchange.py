"""Shards on their way to ranks that hold them for others, and what happens when they arrive wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.nonempty import some
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world
from tests.unit.in_memory.some_parts import SHAPES, content, no_progress

from elastipod.in_memory import shard_copies, shard_exchange
from elastipod.in_memory.contiguous_image import contiguous_image, room_beside
from elastipod.in_memory.parts import part_of
from elastipod.in_memory.shard_copies import Copies, ShardCopies
from elastipod.in_memory.shard_exchange import TRIES, any_raised, exchange_images, exchange_parts

MEMBERS: Any = None


def run_world(size: int, body: Callable[[int], Any]) -> list[Any]:
    port = free_port()

    def rank_body(rank: int) -> Any:
        with world(rank, size, port):
            return body(rank)

    return run_ranks(size, rank_body)


def test_parts_arrive_whole_and_only_where_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 takes two parts at once, rank 0 one, rank 2 none; the part of rank 1 stays where it is."""
    monkeypatch.setattr(shard_exchange, "part_content", content)
    takers = {part_of(3, 0): 1, part_of(3, 2): 1, part_of(3, 1): 0}
    givers = {part_of(3, index): index for index in range(3)}

    def body(rank: int) -> Any:
        told: list[int] = []
        taken = exchange_parts(MEMBERS, part_of(3, rank), takers, givers, lambda: told.append(1))
        any_raised(False)
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
    monkeypatch.setattr(shard_exchange, "MESSAGE_BYTES", 40)
    monkeypatch.setattr(shard_copies, "live_part", content)
    holders = {rank: (rank + 1) % size for rank in range(size)} | {1: 0}
    monkeypatch.setattr(ShardCopies, "_choose_holders", lambda *_: holders)

    def body(rank: int) -> Any:
        told: list[int] = []
        images = ShardCopies(Copies(10**6)).take(
            4, MEMBERS, part_of(size, rank), lambda: told.append(1), lambda _: None
        )
        any_raised(False)
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
        num_digests = sum(1 for each in held if num_messages(each))
        assert num_told == sum(map(num_messages, held)) + num_digests


def change_a_byte_of(monkeypatch: pytest.MonkeyPatch, number: int, *, sender: int, times: int = 1) -> None:
    """Let a message of one rank arrive with another byte. number: which one of those that it sends."""
    right: Any = dist.isend
    sent: list[int] = []

    def isend(data: torch.Tensor, *, dst: int) -> Any:
        if dist.get_rank() == sender:
            sent.append(dst)
            if number <= len(sent) < number + times:
                data = data.clone()
                data[-1] ^= 1
        return right(data, dst=dst)

    monkeypatch.setattr(dist, "isend", isend)


@pytest.mark.parametrize("number", [1, 2, 3], ids=["a piece", "the last piece", "the digests"])
def test_a_copy_that_changes_on_its_way_is_not_kept(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Of three ranks, each holds the part of the rank before it."""
    monkeypatch.setattr(shard_exchange, "MESSAGE_BYTES", 40)
    holders = {rank: (rank + 1) % 3 for rank in range(3)}
    change_a_byte_of(monkeypatch, number, sender=1)

    def body(rank: int) -> Any:
        own = contiguous_image(content(None, part_of(3, rank)), no_progress)
        images, wrong = exchange_images(own, holders, no_progress)
        any_raised(False)
        return [[image.part for image in images], wrong]

    assert run_world(3, body) == [[[part_of(3, 2)], []], [[part_of(3, 0)], []], [[], [1]]]


@pytest.mark.parametrize("times", [1, TRIES, 9 * TRIES], ids=["once", "each time", "always"])
def test_parts_that_change_on_their_way_are_sent_again(
    monkeypatch: pytest.MonkeyPatch, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_exchange, "part_content", content)
    takers, givers = {part_of(3, 2): 0, part_of(3, 1): 0}, {part_of(3, 1): 1, part_of(3, 2): 2}
    change_a_byte_of(monkeypatch, 1, sender=2, times=times)

    def body(rank: int) -> Any:
        taken: list[Any] = []
        raised = raised_by(lambda: taken.extend(exchange_parts(MEMBERS, part_of(3, rank), takers, givers, no_progress)))
        right = [
            torch.equal(each, content(None, one.part).tensors[key])
            for one in taken
            for key, each in one.tensors.items()
        ]
        return [raised, right, [record.getMessage() for record in caplog.records]]

    found = run_world(3, body)
    said = ["the shards of rank 2 have arrived on rank 0 with other content than they were sent with"]
    if times < TRIES:
        assert [each[0] for each in found] == [[]] * 3
        assert found[0][1:] == [[True] * 6, said * times]
    else:
        text = f"shards have arrived with other content than they were sent with, {TRIES} times"
        assert [each[0] for each in found] == [["PartsDiffer", text]] * 3
        assert found[0][2] == said * TRIES


def test_an_image_and_those_beside_it_share_what_every_rank_has_whole() -> None:
    own = contiguous_image(content(None, part_of(3, 0)), no_progress)
    other = room_beside(own.content, part_of(3, 2))
    assert other.content.tensors["step"] is own.content.tensors["step"]
    assert {tensor.untyped_storage().data_ptr() for key, tensor in own.content.tensors.items() if key != "step"} == {
        own.raw.untyped_storage().data_ptr()
    }, "one stretch of memory"
    first, second = (own.content.tensors[shape.key].data_ptr() for shape in SHAPES if shape.dim is not None)
    assert second - first == 32, "24 bytes, and those up to the next number of any size"


def test_flags_of_a_single_rank_need_nobody() -> None:
    assert not dist.is_initialized()
    assert any_raised(True, False) == [True, False]


def test_all_ranks_hear_what_one_of_them_says() -> None:
    def body(rank: int) -> Any:
        return [any_raised(rank == 1, False, True), any_raised(False)]

    assert run_world(3, body) == [[[True, False, True], [False]]] * 3
