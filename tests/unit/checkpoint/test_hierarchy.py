"""Words go to rank 0 and back as if all were connected, whatever the teams, and no rank but 0 pays for the size of the world."""

from __future__ import annotations

import math

import pytest
from bench.many_ranks.cases import held_by
from bench.many_ranks.world import SimulatedExchange, run
from hypothesis import given, settings
from hypothesis import strategies as st

from elastipod.checkpoint.hierarchy import FLAT, Teams
from elastipod.checkpoint.save_plan import Plan, make_plan
from elastipod.checkpoint.staging import agreed_plan
from elastipod.errors import CheckpointError

TENSORS = 24


@given(world_size=st.integers(1, 20_000))
def test_teams_cover_the_world_once_and_keep_connections_few(world_size: int) -> None:
    teams = Teams.of(world_size)
    assert [rank for leader in teams.leaders for rank in teams.members(leader)] == list(range(world_size))
    assert all(teams.members(leader)[0] == leader for leader in teams.leaders)
    if world_size > FLAT:
        assert teams.size + len(teams.leaders) <= 2 * math.sqrt(world_size) + 9


@settings(max_examples=25, deadline=None)
@given(
    world_size=st.integers(1, 14),
    size=st.integers(1, 14),
    sizes=st.lists(st.integers(0, 3000), min_size=14, max_size=14),
)
def test_words_arrive_whatever_the_teams(world_size: int, size: int, sizes: list[int]) -> None:
    teams = Teams(world_size, min(size, world_size))

    def body(exchange: SimulatedExchange) -> list[object]:
        relay = exchange._meeting
        assert relay is not None
        said = relay.gather(bytes([exchange.rank]) * sizes[exchange.rank])
        everyone = relay.broadcast(b"".join(said))
        return [everyone, relay.scatter(said, teams)]

    _, results = run(world_size, body, teams)
    words = [bytes([rank]) * sizes[rank] for rank in range(world_size)]
    assert results == [[b"".join(words), word] for word in words]


@pytest.mark.parametrize("world_size", [3, 20])
def test_a_failure_is_raised_on_all_and_names_the_first_rank(world_size: int) -> None:
    def work(rank: int) -> int:
        if rank in (1, world_size - 1):
            raise OSError("the disk is gone")
        return rank

    def body(exchange: SimulatedExchange) -> str:
        with pytest.raises(CheckpointError) as failure:
            exchange.meet(lambda: work(exchange.rank), sum)
        assert exchange.meet(lambda: exchange.rank, sum) == sum(range(world_size)), "the next words are not disturbed"
        return str(failure.value)

    assert run(world_size, body)[1] == ["rank 1: the disk is gone"] * world_size


def test_rank_zero_decides_and_fails_in_its_own_words() -> None:
    def fail() -> None:
        raise OSError("nothing is there")

    def body(exchange: SimulatedExchange) -> object:
        with pytest.raises(CheckpointError, match=r"^nothing is there$"):
            exchange.meet_zero(fail)
        return exchange.meet_zero(lambda: exchange.rank)

    assert run(18, body)[1] == [0] * 18


def test_the_agreed_plan_is_the_one_that_rank_0_would_make_of_everything() -> None:
    world_size = 20
    held = [held_by(rank, world_size, TENSORS) for rank in range(world_size)]

    def body(exchange: SimulatedExchange) -> str:
        return agreed_plan(exchange, lambda: held[exchange.rank], is_in_memory=True)[0]

    texts = set(run(world_size, body)[1])
    assert [Plan.from_json(text) for text in texts] == [make_plan(held, is_in_memory=True)]


def test_a_rank_without_a_box_of_a_small_tensor_plans_with_the_others() -> None:
    """Its names are not rank 0's, which therefore asks for them."""
    held = [held_by(rank, 6, TENSORS) for rank in range(6)]
    held = [
        own if rank < 4 else type(own)(own.node, own.chunks[: TENSORS // 2], own.values)
        for rank, own in enumerate(held)
    ]

    def body(exchange: SimulatedExchange) -> str:
        return agreed_plan(exchange, lambda: held[exchange.rank], is_in_memory=False)[0]

    (text,) = set(run(6, body)[1])
    plan = Plan.from_json(text)
    assert {chunk.place for chunk in plan.chunks} == {chunk.place for own in held for chunk in own.chunks}
    assert plan == make_plan(held, is_in_memory=False)


def test_what_a_rank_hears_does_not_grow_with_the_world() -> None:
    """But for rank 0, and the names of all nodes and values in a plan."""

    def agree(exchange: SimulatedExchange) -> None:
        exchange.meet(lambda: [True, exchange.rank], lambda told: all(each for each, _ in told))

    def plan(exchange: SimulatedExchange) -> None:
        agreed_plan(exchange, lambda: held_by(exchange.rank, 128, 400), is_in_memory=True)

    for world_size in (32, 128):
        costs, _ = run(world_size, agree)
        assert max(cost.got_bytes for cost in costs if cost.connections <= Teams.of(world_size).size) < 100
        assert max(cost.connections for cost in costs) <= 3 * math.sqrt(world_size)
    costs, _ = run(128, plan)
    flat_bytes = 128 * 400 * 100
    assert max(cost.got_bytes for cost in costs) < flat_bytes / 20
