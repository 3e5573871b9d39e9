"""Blocks of a script between two steps: where they may stand, how they end, and what a lost world leaves of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.in_memory.models import build
from tests.unit.in_memory.test_state_alone import loss_of, trained_alone
from tests.unit.in_memory.test_state_steps import PLAN, Played
from tests.unit.in_memory.test_step_buffers import Net, values
from tests.unit.library.sample_logs import PLAN as SAMPLES_PLAN

from elastipod import State
from elastipod.in_memory.elastic_step import ElasticStep
from elastipod.in_memory.members import Members
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.step_buffers import StepBuffers
from elastipod.rank_in_world import RankInWorld

PLACE = "in the body of the loop over steps"


def gone(*_: Any) -> None:
    raise WorldLost("a peer")


class World:
    """A state whose world is lost where a test says so; `is_lost_to` tells WorldLost from other errors, as the real one does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.played = Played(monkeypatch, **settings)
        self.state = self.played.state
        self.played.world.is_lost_to = lambda error: isinstance(error, WorldLost)
        self.loop = self.state._train(PLAN, RankInWorld(0, 1), 1)
        self.step: ElasticStep = next(self.loop)

    def names(self) -> list[str]:
        return self.played.names()


# ---- where it may stand


def test_a_block_stands_before_and_after_the_block_of_a_step_and_changes_nothing_of_the_training() -> None:
    state, seen = State(build), []
    for step in state.steps(SAMPLES_PLAN):
        with state.between_steps() as before:
            loss_of(state.model.eval(), [0, 1]).backward()  # type: ignore[no-untyped-call]
        assert before.is_done
        with step as batch:
            loss_of(state.model.train(), batch.indices).backward()  # type: ignore[no-untyped-call]
        with state.between_steps() as after:
            seen.append(state.completed)
        assert after.is_done
    assert seen == list(range(1, state.completed + 1))
    assert state._members.digests() == trained_alone()


def test_a_block_in_a_step_and_one_outside_of_the_loop_are_refused() -> None:
    state = State(build)
    with pytest.raises(TypeError, match=PLACE):
        state.between_steps()
    steps: Any = state.steps(PLAN)
    with pytest.raises(TypeError, match=PLACE), next(steps):
        state.between_steps()
    steps.close()
    with pytest.raises(TypeError, match=PLACE):
        state.between_steps()


def test_an_error_that_is_no_lost_world_passes() -> None:
    state = State(build)
    steps = state.steps(PLAN)
    next(steps)
    block = state.between_steps()
    with pytest.raises(RuntimeError, match="of the script"), block:
        raise RuntimeError("of the script")
    assert not block.is_done


# ---- a lost world


def test_a_world_that_is_lost_after_a_step_ends_the_block_and_the_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    with world.step:
        pass
    with world.state.between_steps() as block:
        gone()
    assert (block.is_done, world.step.is_done) == (False, True)
    with pytest.raises(WorldLost, match="a peer"):
        next(world.loop)
    world.state._optimizers.has_run = False
    world.state._leave(WorldLost("a peer"))
    world.played.world.leave.assert_called_once()
    assert world.played.world.leave.call_args.kwargs == {"is_torn": False}


@pytest.mark.parametrize("error", [None, WorldLost("another one")])
def test_no_step_is_begun_in_a_world_that_was_lost_before_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    """Its gradients may be there all the same, and the other ranks are not in it."""
    world = World(monkeypatch)
    with world.state.between_steps():
        gone()
    with world.step as batch:
        assert batch.step == 1
        if error is not None:
            raise error
    assert not world.step.is_done
    assert world.names() == ["buffers.begin_block"]
    with pytest.raises(WorldLost, match="a peer"):
        next(world.loop)


@pytest.mark.parametrize("is_lost", [True, False])
def test_collectives_of_an_accelerator_are_awaited_at_the_end(monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    world, block = World(monkeypatch), None
    error: Exception = WorldLost("the agent has ended the generation") if is_lost else RuntimeError("of the device")
    world.played.world.await_gradients.side_effect = error
    if is_lost:
        with world.state.between_steps() as block:
            pass
        assert world.step.lost_to is error
    else:
        block = world.state.between_steps()
        with pytest.raises(RuntimeError, match="of the device"), block:
            pass
        assert world.step.lost_to is None
    assert not block.is_done
    assert world.names() == ["buffers.begin_block", "world.await_gradients", *["buffers.end_block"] * (not is_lost)]


# ---- what it changes


@pytest.fixture
def members() -> Members:
    return Members({"model": Net()})


def forward(members: Members) -> list[list[float]]:
    """Change the statistics; give them."""
    members.model(torch.randn(4, 3))
    return values(members)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("is_whole", [True, False])
def test_an_interrupted_block_leaves_nothing_in_statistics(members: Members, is_whole: bool, steps_before: int) -> None:
    buffers = StepBuffers(members)
    for _ in range(steps_before):
        buffers.begin()
        forward(members)
        buffers.committed()
    before = values(members)
    assert buffers.begin_block()
    after = forward(members)
    if is_whole:
        buffers.end_block()
    buffers.restore()
    assert values(members) == (after if is_whole else before)


def test_a_block_before_the_first_step_of_a_world_does_not_say_what_steps_change(members: Members) -> None:
    buffers = StepBuffers(members)
    assert buffers.begin_block()
    buffers.end_block()
    for _ in range(2):
        before = values(members)
        buffers.begin()
        after = forward(members)
        buffers.committed()
        assert before != after
    buffers.begin()
    forward(members)
    buffers.restore()
    assert values(members) == after


def test_what_a_block_changes_after_an_interrupted_step_goes_back_with_that(members: Members) -> None:
    buffers = StepBuffers(members)
    before = values(members)
    buffers.begin()
    forward(members)
    assert not buffers.begin_block()
    forward(members)
    buffers.restore()
    assert values(members) == before
