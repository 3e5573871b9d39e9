"""A model of the in-memory protocol: ranks, their collectives, one operator, and faults, as states and steps between them.

The ranks run `elastipod.in_memory.rank` itself; the model adds what lies between them. A collective is known by its place
in the order of its generation: a rank can leave it once every member has entered it, also one that died since, and it may
fail for a rank as soon as a member is dead or has left. Both hold at once, so one rank may commit what another one saw fail:
that is what makes the protocol hard. A hung rank fails nothing (gloo does not free one that waits); it must be killed.

What tensors hold is the history of the generations that computed each step, so that two states of one step that were
computed apart differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.in_memory.operator_moves import operator_moves
from tests.sim.in_memory.rank_moves import rank_moves
from tests.sim.in_memory.world import (
    Life,
    Move,
    Process,
    World,
    with_dead,
)

from elastipod.in_memory.phases import Phase


def moves(world: World) -> Iterator[Move]:
    """Give everything that may happen next."""
    if world.from_storage:
        return
    for number, process in enumerate(world.processes):
        if process.life is Life.DEAD:
            continue
        if process.is_up:
            yield from rank_moves(world, number, process)
        if world.faults < world.rules.num_faults and not world.is_done:
            yield from fault_moves(world, number, process)
    yield from operator_moves(world)


def fault_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    spent = replace(world, faults=world.faults + 1)
    yield Move(f"kill {number}", with_dead(spent, number), is_fault=True)
    if process.is_up:
        yield Move(f"hang {number}", spent.with_process(number, replace(process, life=Life.HUNG)), is_fault=True)
        if process.state.phase is Phase.PREPARED:
            raised = replace(process, state=process.state.failed_inside_optimizer().detached(), tensors=())
            yield Move(f"raise in the optimizer of {number}", spent.with_process(number, raised), is_fault=True)
