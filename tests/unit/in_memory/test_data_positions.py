"""Members that read data: they are told their place in each world, and a step that does not count leaves nothing in them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world
from tests.unit.in_memory.models import build
from tests.unit.library.sample_logs import PLAN
from torch import nn

from elastipod import State
from elastipod.in_memory.data_positions import DataPositions
from elastipod.in_memory.members import Members
from elastipod.in_memory.memory_state import compare_replicas
from elastipod.in_memory.step_buffers import StepBuffers


class Position:
    """A member with a state, as a loader that knows no worlds has it."""

    def __init__(self, at: Any = 0) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": torch.full((2,), hash(self.at))}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["seen"].tolist() == [hash(state_dict["at"])] * 2
        self.at = state_dict["at"]


class Follower(Position):
    """One that knows them."""

    def __init__(self, at: int = 0) -> None:
        super().__init__(at)
        self.worlds: list[tuple[int, int, int]] = []

    def set_world(self, rank: int, world_size: int) -> None:
        self.worlds.append((rank, world_size, self.at))


def test_a_step_that_does_not_count_is_put_back_in_members_that_follow_the_world_only() -> None:
    follower, other = Follower(3), Position(3)
    undo = StepBuffers(Members({"model": nn.Linear(1, 1), "loader": follower, "other": other}))
    undo.restore()
    undo.begin()
    follower.at = other.at = 4
    undo.restore()
    undo.restore()
    assert (follower.at, other.at) == (3, 4)
    undo.redo()
    undo.redo()
    assert follower.at == 4, "the step counts all the same"
    undo.restore()
    undo.forget()
    undo.redo()
    assert follower.at == 3
    undo.begin()
    follower.at = 5
    undo.committed()
    undo.restore()
    assert follower.at == 5, "nothing is put back between two steps"


def test_a_state_tells_such_members_their_place_before_the_first_step() -> None:
    follower = Follower()
    state = State(lambda: {**build(), "loader": follower})
    for step in state.steps(PLAN):
        assert state.loader.worlds == [(0, 1, 0)]
        with step as batch:
            follower.at = batch.step
            state.model(torch.ones(4, 3)).sum().backward()
    assert follower.at == PLAN.total_steps


def compared(make: Callable[[int], Any], rank: int, port: int) -> dict[str, Any]:
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("elastipod.in_memory.data_positions").addHandler(handler)
    with world(rank, 2, port):
        members = Members({"model": nn.Linear(1, 1), "loader": make(rank)})
        positions = DataPositions(members)
        for _ in range(2):
            positions.compare_others(rank)
        digests = {key: digest for key, digest in members.digests().items() if key == "loader"}
        raised = raised_by(lambda: compare_replicas(digests, 0, "after step 7"))
    return {"told": told, "raised": raised}


def test_other_members_whose_state_differs_between_ranks_are_named_once() -> None:
    first, second = run_ranks(2, partial(compared, Position, port=free_port()))
    (sentence,) = first["told"]
    assert sentence.startswith(
        "the state of loader differs between ranks, and a rank that joins or is replaced gets that of"
    )
    assert (second["told"], first["raised"], second["raised"]) == ([], [], [])


@pytest.mark.parametrize("make", [lambda _: Position(8), lambda _: Position(print), lambda _: nn.Linear(1, 1)])
def test_other_members_are_not_named_while_they_are_equal_or_cannot_be_sent(make: Callable[[int], Any]) -> None:
    assert [each["told"] for each in run_ranks(2, partial(compared, make, port=free_port()))] == [[], []]


def test_members_that_follow_the_world_have_the_same_state_on_all_ranks() -> None:
    first, second = run_ranks(2, partial(compared, Follower, port=free_port()))
    assert (first["told"], second["told"]) == ([], [])
    assert first["raised"] == ["WorldLost", "after step 7 the state of rank 1 differs from that of rank 0"]
    assert second["raised"] == [
        "StateDiffersError",
        "after step 7 the state of rank 1 differs from that of rank 0, in loader",
    ]
