"""Ranks meet while each does its own work on a sharded state, so that none is given up that only has more to do than the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastipod.in_memory import shard_checks, shard_meetings
from elastipod.in_memory.members import Members, TensorShape
from elastipod.in_memory.memory_state import WorldLost
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.offer_wire import RankOffer
from elastipod.in_memory.offers import Offer
from elastipod.in_memory.parts import PartContent, ShardedShape, live_part, part_of
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_exchange import any_raised
from elastipod.in_memory.shard_meetings import MEET_AFTER_S, Meetings
from elastipod.in_memory.shard_plan import Message, PartSpan
from elastipod.in_memory.shard_transfer import PartSources, PartTarget, exchange
from elastipod.in_memory.sharded_memory import ShardedMemory
from elastipod.in_memory.state_transfer import Span
from elastipod.torch_compat import set_group_timeout

LIMIT_S = 2.0


def test_a_rank_that_sums_longer_than_a_collective_may_take_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    placed_sum = shard_checks.placed_sum

    def body(rank: int) -> Any:
        def slow(raw: torch.Tensor, start: int, shape: ShardedShape, progress: Callable[[], None]) -> int:
            until = time.monotonic() + 1.5 * LIMIT_S
            while time.monotonic() < until and not rank:
                time.sleep(0.05)
                progress()
            return placed_sum(raw, start, shape, progress)

        monkeypatch.setattr(shard_checks, "placed_sum", slow)
        with world(rank, 2, port):
            mesh = init_device_mesh("cpu", (2,))
            model = nn.Linear(2, 4, bias=False)
            fully_shard(model, mesh=mesh)
            members, limit = Members({"model": model}), mock.MagicMock(spec=PhaseLimit)
            memory = ShardedMemory(members, limit, mock.Mock(), MeshPlan.of({"shard": -1}), None)
            memory._mesh, memory._part = mesh, part_of(2, rank)
            live = live_part(members, part_of(1, 0))
            memory.rank = RankState(Phase.FILLING, 2)
            if not rank:
                memory._held = PartContent(live.part, live.shapes, {"model.weight": torch.ones(4, 2)}, live.values)
                memory.rank = RankState(Phase.FILLING, 2, frozenset({live.part}), 5)
            set_group_timeout(timedelta(seconds=LIMIT_S))
            resume = mock.Mock(step=5, donors={live.part: (0,)})
            found = raised_by(lambda: memory.fill(resume, [RankOffer(Offer(), 0)] * 2, limit.progress))
            return [found, model.weight.to_local().tolist()]  # type: ignore[attr-defined]

    assert run_ranks(2, body) == [[[], [[1.0, 1.0]] * 2]] * 2


def test_ranks_without_messages_wait_for_those_that_have_more_than_a_collective_may_take() -> None:
    """Two of three have messages in both directions; the third one waits in a collective of the default group."""
    port, number = free_port(), 24
    shape = ShardedShape(TensorShape("a", "uint8", (2 * number,)), 0)
    halves = [part_of(2, 0), part_of(2, 1)]
    sent = [
        Message(
            at, to, 1 - to, (PartSpan(Span("a", at + number * (1 - to), at + 1 + number * (1 - to)), halves[1 - to]),)
        )
        for at in range(number)
        for to in (0, 1)
    ]

    def body(rank: int) -> Any:
        def beat() -> None:
            time.sleep(1.5 * LIMIT_S / number if rank == 1 else 0.0)

        target = PartTarget(halves[1 - rank % 2], [shape], {"a": torch.zeros(number, dtype=torch.uint8)})
        whole = {"a": torch.full((number,), rank, dtype=torch.uint8)}
        sources = PartSources({halves[rank % 2]: PartContent(halves[rank % 2], (shape,), whole, "")})
        own = [each for each in sent if rank in (each.receiver, each.donor)]
        with world(rank, 3, port):
            set_group_timeout(timedelta(seconds=LIMIT_S))
            meetings = Meetings(lambda: None)
            found = raised_by(lambda: exchange(own, {0: target}, sources, beat, meetings.meet, meet_after=3))
            any_raised(False)
        return [found, target.view(PartSpan(Span("a", *shape.stretch(halves[1 - rank % 2])), 0)).tolist()]

    assert run_ranks(3, body) == [[[], [1] * number], [[], [0] * number], [[], [0] * number]]


def test_ranks_meet_as_often_as_the_clock_says_until_all_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said, others, beats = [0.0], list[bool](), [True, True, False], list[int]()

    def meet(is_busy: bool) -> list[bool]:
        said.append(is_busy)
        return [is_busy or others.pop(0)]

    monkeypatch.setattr(shard_meetings, "any_raised", meet)
    meetings = Meetings(lambda: beats.append(1), lambda: now[0])
    for moment in (0.9, 1.0, 1.5, 2.0):
        now[0] = moment * MEET_AFTER_S
        meetings.progress()
    assert (said, len(beats)) == ([True, True], 6)
    meetings.finish()
    assert (said, others) == ([True, True, False, False, False], [])
    monkeypatch.setattr(shard_meetings, "any_raised", mock.Mock(side_effect=RuntimeError("closed")))
    with pytest.raises(WorldLost, match="the ranks could not wait for each other: closed"):
        meetings.finish()


def test_a_single_process_meets_nobody() -> None:
    assert not dist.is_initialized()
    Meetings(lambda: None).finish()
