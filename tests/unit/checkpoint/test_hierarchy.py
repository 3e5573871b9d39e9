"""Words go to rank 0 and back as if all were connected, whatever the teams, and no rank but 0 pays for the size of the world."""

from __future__ import annotations

import math

import pytest
from bench.many_ranks.cases import local_state_of
from bench.many_ranks.world import SimulatedCommunicator, run
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.nonempty import every
from tests.unit.checkpoint.save_plans import make_save_plan

from elastipod.checkpoint.collective_planning import plan_across_ranks
from elastipod.checkpoint.hierarchy import MAX_FLAT_RANKS, Hierarchy
from elastipod.checkpoint.save_plan import SavePlan
from elastipod.errors import CheckpointError

TENSORS = 24


@given(world_size=st.integers(1, 20_000))
def test_teams_cover_the_world_once_and_keep_connections_few(world_size: int) -> None:
    hierarchy = Hierarchy.of(world_size)
    assert [rank for leader in hierarchy.leaders for rank in hierarchy.members(leader)] == list(range(world_size))
    assert every(hierarchy.members(leader)[0] == leader for leader in hierarchy.leaders)
    if world_size > MAX_FLAT_RANKS:
        assert hierarchy.size + len(hierarchy.leaders) <= 2 * math.sqrt(world_size) + 9


@settings(max_examples=25, deadline=None)
@given(
    world_size=st.integers(1, 14),
    size=st.integers(1, 14),
    sizes=st.lists(st.integers(0, 3000), min_size=14, max_size=14),
)
def test_words_arrive_whatever_the_teams(world_size: int, size: int, sizes: list[int]) -> None:
    hierarchy = Hierarchy(world_size, min(size, world_size))

    def body(comm: SimulatedCommunicator) -> list[object]:
        relay = comm._training
        assert relay is not None
        said = relay.gather(bytes([comm.rank]) * sizes[comm.rank])
        everyone = relay.broadcast(b"".join(said))
        return [everyone, relay.scatter(said, hierarchy)]

    _, results = run(world_size, body, hierarchy)
    words = [bytes([rank]) * sizes[rank] for rank in range(world_size)]
    assert results == [[b"".join(words), word] for word in words]


@pytest.mark.parametrize("world_size", [3, 20])
def test_a_failure_is_raised_on_all_and_names_the_first_rank(world_size: int) -> None:
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    def work(rank: int) -> int:
        if rank in (1, world_size - 1):
            raise OSError("the disk is gone")
        return rank

    def body(comm: SimulatedCommunicator) -> str:
        with pytest.raises(CheckpointError) as failure:
            comm.training_all_reduce(lambda: work(comm.rank), total)
        assert comm.training_all_reduce(lambda: comm.rank, total) == sum(range(world_size)), (
            "the next words are not disturbed"
        )
        return str(failure.value)

    assert run(world_size, body)[1] == ["rank 1: the disk is gone"] * world_size


def test_rank_zero_decides_and_fails_in_its_own_words() -> None:
    def fail() -> None:
        raise OSError("nothing is there")

    def body(comm: SimulatedCommunicator) -> object:
        with pytest.raises(CheckpointError, match=r"^nothing is there$"):
            comm.training_broadcast(fail)
        return comm.training_broadcast(lambda: comm.rank)

    assert run(18, body)[1] == [0] * 18


def test_the_agreed_plan_is_the_one_that_rank_0_would_make_of_everything() -> None:
    world_size = 20
    held = [local_state_of(rank, world_size, TENSORS) for rank in range(world_size)]

    def body(comm: SimulatedCommunicator) -> str:
        return plan_across_ranks(comm, lambda: held[comm.rank], is_in_memory=True)[0]

    texts = set(run(world_size, body)[1])
    assert [SavePlan.from_json(text) for text in texts] == [make_save_plan(held, is_in_memory=True)]


def test_a_rank_without_a_box_of_a_small_tensor_plans_with_the_others() -> None:
    """Its names are not rank 0's, which therefore asks for them."""
    held = [local_state_of(rank, 6, TENSORS) for rank in range(6)]
    held = [
        own if rank < 4 else type(own)(own.node, own.chunks[: TENSORS // 2], own.values)
        for rank, own in enumerate(held)
    ]

    def body(comm: SimulatedCommunicator) -> str:
        return plan_across_ranks(comm, lambda: held[comm.rank], is_in_memory=False)[0]

    (text,) = set(run(6, body)[1])
    plan = SavePlan.from_json(text)
    assert {chunk.index for chunk in plan.chunks} == {chunk.index for own in held for chunk in own.chunks}
    assert plan == make_save_plan(held, is_in_memory=False)


def test_what_a_rank_hears_does_not_grow_with_the_world() -> None:
    """But for rank 0, and the names of all nodes and values in a plan."""

    def agree(comm: SimulatedCommunicator) -> None:
        comm.training_all_reduce(lambda: [True, comm.rank], lambda told: all(each for each, _ in told))

    def plan(comm: SimulatedCommunicator) -> None:
        plan_across_ranks(comm, lambda: local_state_of(comm.rank, 128, 400), is_in_memory=True)

    for world_size in (32, 128):
        costs, _ = run(world_size, agree)
        assert max(cost.got_bytes for cost in costs if cost.connections <= Hierarchy.of(world_size).size) < 100
        assert max(cost.connections for cost in costs) <= 3 * math.sqrt(world_size)
    costs, _ = run(128, plan)
    flat_bytes = 128 * 400 * 100
    assert max(cost.got_bytes for cost in costs) < flat_bytes / 20
