"""A planned change of ranks that hold copies of each other's shards: what they hold counts, and is not sent again."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from tests.free_ports import free_port
from tests.nonempty import every
from tests.unit.in_memory.forked_ranks import run_ranks, world
from torch import nn

from elastipod.in_memory import shard_copies, shard_exchange, sharded_memory
from elastipod.in_memory.agent_link import Fate
from elastipod.in_memory.members import Members, TensorShape
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.parts import PartContent, ShardedShape, part_of
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.shard_copies import Copies
from elastipod.in_memory.sharded_memory import ShardedMemory

SIZE, STAYING = 8, 6
SHAPE = ShardedShape(TensorShape("model.w", "float32", (2 * SIZE,)), 0)
PART_BYTES = 8
OF_FORMER_WORLD = part_of(4, 0)  # takes as much as two parts


def content(part: int) -> PartContent:
    return PartContent(part, (SHAPE,), {SHAPE.key: torch.full(SHAPE.local_sizes(part), float(part))}, "values")


@pytest.mark.parametrize("has_former", [False, True], ids=["copies", "copies and what a former layout has left"])
def test_copies_that_are_held_count_within_the_budget_and_are_not_sent_again(
    monkeypatch: pytest.MonkeyPatch, has_former: bool
) -> None:
    """Each rank has a copy of its neighbour's shards, so two parts of a step, and may have two of another step."""
    port = free_port()
    for module in (sharded_memory, shard_copies):
        monkeypatch.setattr(module, "live_part", lambda _, part: content(part))
    monkeypatch.setattr(shard_exchange, "part_content", lambda _, part: content(part))

    def body(rank: int) -> Any:
        members, limit = Members({"model": nn.Linear(1, 1)}), mock.MagicMock(spec=PhaseLimit)
        memory = ShardedMemory(members, limit, mock.Mock(), MeshPlan.of({"shard": -1}), Copies(4 * PART_BYTES))
        own, neighbour = part_of(SIZE, rank), part_of(SIZE, (rank - 1) % SIZE)
        memory._part, memory._is_live = own, True
        memory.rank = RankState(Phase.TRAINING, 1, frozenset({own}), 5)
        for part in (own, neighbour, *([OF_FORMER_WORLD] if has_former and rank == STAYING - 1 else ())):
            memory._keep(5, content(part))
        memory._copies._complete = {5}
        with world(rank, SIZE, port):
            assert memory.hand_over([Fate.STAYS] * STAYING + [Fate.LEAVES] * (SIZE - STAYING))
        held = memory._kept[5]
        assert every(bool((each.tensors[SHAPE.key] == part).all()) for part, each in held.items())
        return [sorted(held), memory._image_bytes()]

    staying = run_ranks(SIZE, body)[:STAYING]
    assert max(num_bytes for _, num_bytes in staying) <= 4 * PART_BYTES
    holders = Counter(part for parts, _ in staying for part in parts if part != OF_FORMER_WORLD)
    assert len(holders) == SIZE, "nothing leaves with the ranks"
    if not has_former:
        assert set(holders.values()) == {2}, "no part is held more than twice, and none can be lost with one rank"
