"""Which bytes of a sharded state go where when the number of shards changes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from tests.nonempty import every

from elastipod.in_memory import shard_plan
from elastipod.in_memory.members import TensorShape
from elastipod.in_memory.offers import Offer
from elastipod.in_memory.parts import ShardedShape, part_of, parts_of, place_of
from elastipod.in_memory.shard_plan import (
    Message,
    Need,
    concerned_messages,
    first_holders,
    local_spans,
    messages,
    newest_layout,
    receivers_of_parts,
    second_holders,
)


def shape(key: str, *sizes: int, dim: int | None = 0) -> ShardedShape:
    return ShardedShape(TensorShape(key, "float32", sizes), dim)


SHAPES = (
    shape("a", 50, 8),
    shape("b", 3, 8),
    shape("c", 7),
    shape("d", 6, 12, dim=1),
    shape("e", dim=None),
    shape("f", 0, 4),
)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 60])
@pytest.mark.parametrize("each", SHAPES, ids=lambda each: each.key)
def test_parts_are_those_of_torch_chunk(each: ShardedShape, num_shards: int) -> None:
    if each.dim is None:
        assert {each.stretch(part) for part in parts_of(num_shards)} == {(0, each.whole.num_bytes)}
        return
    whole = torch.empty(each.whole.sizes)
    chunks = [tuple(chunk.shape) for chunk in whole.chunk(num_shards, each.dim)]
    own = [each.local_sizes(part_of(num_shards, index)) for index in range(num_shards)]
    assert [sizes for sizes in own if sizes[each.dim]] == [sizes for sizes in chunks if sizes[each.dim]]
    ends = [each.stretch(part_of(num_shards, index)) for index in range(num_shards)]
    assert ends[0][0] == 0
    assert ends[-1][1] == each.whole.num_bytes
    assert [stop for _, stop in ends[:-1]] == [start for start, _ in ends[1:]]


def test_a_part_of_another_layout_has_another_number() -> None:
    numbers = [part for num_shards in (1, 2, 3) for part in parts_of(num_shards)]
    assert len(set(numbers)) == 6
    assert 0 not in numbers, "the number of replicated state"
    assert place_of(part_of(512, 511)) == (512, 511)


def covered(need: Need, got: list[Message], num_shards: int) -> dict[str, list[tuple[int, int]]]:
    spans = [each.span for each in local_spans(SHAPES, need, num_shards)]
    spans += [each.span for message in got for each in message.spans]
    found: dict[str, list[tuple[int, int]]] = {}
    for span in sorted(spans, key=lambda span: (span.key, span.start)):
        found.setdefault(span.key, []).append((span.start, span.stop))
    return found


@pytest.mark.parametrize(("old", "new"), [(1, 4), (4, 1), (2, 5), (5, 3), (4, 4), (3, 60)])
def test_every_rank_gets_each_byte_of_its_part_once_and_from_a_holder(old: int, new: int) -> None:
    donors = {part: (place_of(part)[1], old + place_of(part)[1]) for part in parts_of(old)}  # two replicas
    num_needed = 0
    for receiver in range(new):
        held = frozenset(part for part, ranks in donors.items() if receiver in ranks)
        need = Need(receiver, part_of(new, receiver), held)
        got = messages(SHAPES, need, old, donors, size=64)
        for each in SHAPES:
            start, stop = each.stretch(need.part)
            pieces = covered(need, got, old).get(each.key, [(start, start)])
            assert (pieces[0][0], pieces[-1][1]) == (start, stop)
            assert [end for _, end in pieces[:-1]] == [begin for begin, _ in pieces[1:]], each.key
            num_needed += stop > start
        for message in got:
            assert message.num_bytes <= 64
            assert every(message.donor in donors[each.part] for each in message.spans)
            assert message.donor != receiver
    assert num_needed


def test_messages_are_divided_over_all_holders() -> None:
    donors = {part_of(1, 0): (0, 1, 2)}
    got = messages([shape("a", 3000)], Need(3, part_of(2, 0), frozenset()), 1, donors, size=100)
    counts = Counter(message.donor for message in got)
    assert set(counts) == {0, 1, 2}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_order_of_messages_lets_no_two_ranks_wait_for_each_other() -> None:
    """Every rank handles its messages in order, a few at a time. Played with the smallest window, all of them arrive."""
    rng = random.Random(4)
    for _ in range(50):
        old, new = rng.randint(1, 5), rng.randint(1, 6)
        donors = {part: (place_of(part)[1] % new,) for part in parts_of(old)}
        sent: list[Message] = []
        for receiver in range(new):
            held = frozenset(part for part, ranks in donors.items() if receiver in ranks)
            sent += messages(SHAPES, Need(receiver, part_of(new, receiver), held), old, donors, size=64)
        waiting = {
            rank: sorted((m for m in sent if rank in (m.donor, m.receiver)), key=lambda m: m.order)
            for rank in range(new)
        }
        while any(waiting.values()):
            ready = [
                m for own in waiting.values() for m in own[:1] if waiting[m.donor][0] == m == waiting[m.receiver][0]
            ]
            assert ready, "a circle of ranks that wait"
            for message in {m.order: m for m in ready}.values():
                waiting[message.donor].remove(message)
                waiting[message.receiver].remove(message)


def offer(*parts: int, step: int | None, **images: frozenset[int]) -> Offer:
    return Offer(frozenset(parts), step, False, {int(at[1:]): held for at, held in images.items()})


@pytest.mark.parametrize(
    ("offers", "layout"),
    [
        pytest.param([offer(step=None)] * 2, None, id="newcomers"),
        pytest.param([offer(part_of(2, 0), step=5), offer(part_of(2, 1), step=5)], 2, id="all of one layout"),
        pytest.param([offer(part_of(2, 0), step=5), offer(part_of(2, 1), step=4)], None, id="parts of two steps"),
        pytest.param(
            [offer(part_of(3, 0), step=6, s5=parts_of(2)), offer(part_of(3, 1), step=6)],
            2,
            id="a part is lost, an image not",
        ),
        pytest.param(
            [offer(part_of(1, 0), step=5, s5=parts_of(2))], 1, id="two layouts of one step: that of the new world"
        ),
    ],
)
def test_the_layout_that_is_whole_at_the_newest_step_is_taken(offers: list[Offer], layout: int | None) -> None:
    assert newest_layout(offers, prefer=1) == layout


def test_a_part_that_leaves_goes_to_the_rank_that_will_need_it() -> None:
    assert receivers_of_parts({part_of(4, 2): 2, part_of(4, 3): 3}, [0, 1], 4) == {part_of(4, 2): 1, part_of(4, 3): 1}
    assert receivers_of_parts({part_of(4, 0): 0}, [1, 2, 3], 4) == {part_of(4, 0): 1}


def test_each_part_of_a_single_holder_gets_a_second_one_in_equal_numbers() -> None:
    first, second, third, fourth = (part_of(4, number) for number in range(4))
    holders = [(first, 0), (second, 1), (third, 1), (fourth, 1)]
    assert second_holders(holders, [0, 1]) == {first: 1, second: 0, third: 0, fourth: 0}
    assert second_holders(holders, [0, 1, 2]) == {first: 1, second: 0, third: 2, fourth: 0}
    assert second_holders([(first, 0), (first, 1), (second, 1)], [0, 1]) == {second: 0}, "the first one has replicas"
    assert second_holders([(first, 0)], [0]) == {}


def test_replicas_are_compared_with_one_that_had_its_part_before() -> None:
    first, second = part_of(2, 0), part_of(2, 1)
    parts = [first, second, first, second]
    assert first_holders({first: (2,), second: (1, 3)}, parts) == [2, 1]
    assert first_holders({first: (1, 2), second: (0,)}, parts) == [2, 1], "rank 0 had what it has no more, as an image"
    assert first_holders({part_of(1, 0): (3,)}, parts) == [0, 1], "in another layout nobody had it"
    assert first_holders({first: (1,)}, [first, second]) == [0, 1]


def needs_of(
    old: int, new: int, num_replicas: int, of_first: frozenset[str]
) -> tuple[list[Need], dict[int, list[int]]]:
    """Give what ranks need, the last of which are newcomers, and who holds the parts of the former layout."""
    num_ranks = new * num_replicas
    donors = {part_of(old, index): [index % num_ranks] for index in range(old)}
    for rank in range(old, num_ranks // 2):
        donors[part_of(old, rank % old)].append(rank)
    held = [frozenset(part for part, ranks in donors.items() if rank in ranks) for rank in range(num_ranks)]
    return [
        Need(rank, part_of(new, rank % new), own, of_first if rank else frozenset()) for rank, own in enumerate(held)
    ], donors


@pytest.mark.parametrize("of_first", [frozenset[str](), frozenset({"e"})])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize(("old", "new"), [(1, 4), (4, 1), (2, 5), (5, 3), (4, 4), (3, 60)])
def test_each_rank_finds_all_messages_that_concern_it(
    old: int, new: int, num_replicas: int, of_first: frozenset[str]
) -> None:
    needs, donors = needs_of(old, new, num_replicas, of_first)
    everything = [message for need in needs for message in messages(SHAPES, need, old, donors)]
    beats: list[int] = []
    for rank in range(len(needs)):
        wanted = [message for message in everything if rank in (message.receiver, message.donor)]
        assert concerned_messages(SHAPES, needs, rank, old, donors, lambda: beats.append(1)) == wanted
    assert len(beats) >= len(needs)


@pytest.mark.parametrize(("rank", "most"), [(0, 5), (200, 5), (511, 5)])
def test_no_rank_of_many_works_out_what_the_others_send_each_other(
    monkeypatch: pytest.MonkeyPatch, rank: int, most: int
) -> None:
    """That takes about 20 s for 512 ranks and some thousand tensors."""
    calls: list[int] = []
    monkeypatch.setattr(shard_plan, "messages", lambda _, need, *__: calls.append(need.receiver) or [])  # type: ignore[func-returns-value]
    needs, donors = needs_of(510, 512, 1, frozenset())
    shapes = [shape("a", 4096, 8), shape("b", 11008, 8), shape("c", 12, 4096, dim=1), shape("e", dim=None)]
    concerned_messages(shapes, needs, rank, 510, donors, lambda: None)
    assert rank in calls
    assert len(calls) <= most
