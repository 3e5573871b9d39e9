"""A model of the in-memory protocol: ranks, their collectives, one operator, and faults, as states and steps between them.

The ranks run `elastipod.in_memory.rank` itself, and the choices of `offers` and `shard_plan`; the model adds what lies between them. A
collective is known by its place in the order of its generation: a rank can leave it once every member has entered it, also one that died
since, and it may fail for a rank as soon as a member is dead or has left. Both hold at once, so one rank may commit what another one saw
fail: that is what makes the protocol hard. A hung rank fails nothing (gloo does not free one that waits); it must be killed.

What tensors hold is the history of the generations that computed each step, so that two states of one step that were
computed apart differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.in_memory.operator_moves import may_be_resized, operator_moves
from tests.sim.in_memory.rank_moves import rank_moves
from tests.sim.in_memory.world import (
    Life,
    Move,
    Process,
    World,
    dead,
    has_failed,
    has_left,
)

from elastipod.in_memory.phases import Phase


def moves(world: World) -> Iterator[Move]:
    """Give everything that may happen next."""
    if world.from_storage:
        return
    for rank, process in enumerate(world.processes):
        if process.is_up:
            yield from rank_moves(world, rank, process)
    if world.faults < world.rules.num_faults:
        yield from fault_moves(world)
    yield from operator_moves(world)


def is_calm(world: World) -> bool:
    """Whether all that may still happen happens in each order: no fault is left, nobody has failed, and no resize comes from now on."""
    if world.faults < world.rules.num_faults or world.from_storage or (world.is_stopping and world.stop_step is None):
        return False
    if any(not process.is_up or has_failed(world, process) for process in world.processes):
        return False
    if all(has_left(world, process) for process in world.processes):
        return False  # the operator may choose who goes on
    return not may_be_resized(world) or any(_is_joining(world, process) for process in world.processes)


def calm_move(world: World) -> Move | None:
    """Give one move of a calm world that each of the others may come before or after. None: there is none, it has ended.

    Before a resize, which comes when all train, it is one of a rank that does not train yet: how far those who do have come is not the same
    to the resize.
    """
    if not may_be_resized(world):
        return next(moves(world), None)
    joining = ((rank, process) for rank, process in enumerate(world.processes) if _is_joining(world, process))
    return next((move for rank, process in joining for move in rank_moves(world, rank, process)), None)


def _is_joining(world: World, process: Process) -> bool:
    return not world.is_in(process) or process.state.phase not in (Phase.TRAINING, Phase.PREPARED)


def fault_moves(world: World) -> Iterator[Move]:
    spent = replace(world, faults=world.faults + 1, exposed=world.exposed + 1)
    hangs = not world.rules.is_reduced or "leave hung ranks" in world.rules.breaks
    for rank, process in enumerate(world.processes):
        if not process.is_up:
            continue  # its agent kills one that hangs
        yield Move(f"kill {rank}", spent.with_process(rank, dead(process)), is_fault=True)
        if hangs:
            yield Move(f"hang {rank}", spent.with_process(rank, replace(process, life=Life.HUNG)), is_fault=True)
        if process.state.phase is Phase.PREPARED:
            yield Move(f"raise in the optimizer of {rank}", spent.with_process(rank, _raised(process)), is_fault=True)
    for number in range(len(world.leavers)):
        yield Move(
            "kill a leaver",
            replace(spent, leavers=(*world.leavers[:number], *world.leavers[number + 1 :])),
            is_fault=True,
        )


def _raised(process: Process) -> Process:
    return replace(process, state=process.state.failed_inside_optimizer().detached(), tensors=None)
