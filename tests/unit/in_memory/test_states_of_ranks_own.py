"""Members whose tensors are their rank's own, of other sizes on each rank, when a world has other ranks than the one before."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import run_ranks, world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from elastipod.in_memory.members import Members
from elastipod.in_memory.mesh_plan import MeshPlan
from elastipod.in_memory.offer_wire import RankOffer
from elastipod.in_memory.offers import Offer
from elastipod.in_memory.parts import PartContent, live_part, part_of
from elastipod.in_memory.phase_limit import PhaseLimit
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState
from elastipod.in_memory.sharded_memory import ShardedMemory
from elastipod.in_memory.state_transfer import transfer

WEIGHT = torch.arange(24.0).view(6, 4)


class Seen:
    """Counts something on its own rank; the lower half of the ranks have a tensor that the others have not got."""

    def __init__(self, rank: int) -> None:
        self._state: dict[str, Any] = {"seen": torch.full((rank + 1,), float(rank)), "count": rank}
        if rank:
            self._state["more"] = torch.ones(2)

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = state

    def told(self) -> list[Any]:
        """Give the state as JSON has it."""
        return [[key, each if isinstance(each, int) else each.tolist()] for key, each in sorted(self._state.items())]


OF_FIRST = [["count", 0], ["seen", [0.0]]]


def test_a_newcomer_of_replicas_has_all_of_one_donor() -> None:
    port = free_port()

    def body(rank: int) -> Any:
        seen = Seen(rank)
        members = Members({"model": nn.Linear(2, 2), "seen": seen})
        with world(rank, 3, port):
            content = transfer(members, [0, 1], [2], lambda: None)
            if content is not None:
                members.load(content)
        return seen.told()

    assert run_ranks(3, body) == [OF_FIRST, [["count", 1], ["more", [1.0, 1.0]], ["seen", [1.0, 1.0]]], OF_FIRST]


@pytest.mark.parametrize("first", [0, 1])
def test_all_of_a_sharded_world_have_tensors_and_values_of_one_rank(first: int) -> None:
    """The first part is held by two ranks, and the lower one of those that offer it gives what all have."""
    port = free_port()

    def body(rank: int) -> Any:
        with world(rank, 3, port):
            mesh = init_device_mesh("cpu", (3,))
            model, seen = nn.Linear(4, 6, bias=False), Seen(rank)
            fully_shard(model, mesh=mesh)
            members = Members({"model": model, "seen": seen})
            limit = mock.MagicMock(spec=PhaseLimit)
            memory = ShardedMemory(members, limit, mock.Mock(), MeshPlan.of({"shard": -1}), None)
            memory._mesh, memory._part = mesh, part_of(3, rank)
            donors = {part_of(2, 0): (first, 2), part_of(2, 1): (1 - first,)}
            (part,) = [part for part, ranks in donors.items() if rank in ranks]
            live = live_part(members, part)
            half = WEIGHT[:3] if part == part_of(2, 0) else WEIGHT[3:]
            memory._held = PartContent(part, live.shapes, {**live.tensors, "model.weight": half.clone()}, live.values)
            memory.rank = RankState(Phase.FILLING, 2, frozenset({part}), 5)
            memory.fill(mock.Mock(step=5, donors=donors), [RankOffer(Offer(), 0)] * 3, limit.progress)
            whole = model.weight.full_tensor()  # type: ignore[attr-defined]
        return [seen.told(), whole.tolist()]

    told = [Seen(first).told(), WEIGHT.tolist()]
    assert run_ranks(3, body) == [told] * 3
