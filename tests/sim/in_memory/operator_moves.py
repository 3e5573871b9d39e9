"""What the operator and the agents do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.in_memory.rank_moves import is_in_reduce, lacks_images, stops_of
from tests.sim.in_memory.world import (
    Life,
    Move,
    Process,
    Violation,
    World,
    has_left,
    with_dead,
)

from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState


def operator_moves(world: World) -> Iterator[Move]:
    for number, process in enumerate(world.processes):
        if process.life is Life.HUNG and "leave hung ranks" not in world.rules.breaks:
            yield Move(f"the agent kills {number}, which hangs", with_dead(world, number))
    if world.leavers and _is_settled(world):
        yield Move("the leavers go", _dismissed(world, world.leavers))
    if not world.is_stopping:
        if any(has_left(world, m) for m in world.members):
            yield Move("the operator sees a fault", replace(world, is_stopping=True))
        elif (step := _stop_step(world)) is not None:
            yield Move("the operator plans a resize", replace(world, is_stopping=True, stop_step=step, resizes=1))
        return
    if world.stop_step is None or any(_has_failed(world, m) for m in world.members):
        for member in world.members:
            process = world.processes[member]
            if process.is_up and world.is_member(member) and process.state.phase is not Phase.PARKED:
                yield from stops_of(world, member, process, "is stopped")
    if all(_is_out(world.processes[m]) for m in world.members):
        yield Move("the operator allocates a generation", _next_generation(world))


def _has_failed(world: World, member: int) -> bool:
    """Whether a member has left, though it did not reach the step at which all were to stop."""
    process = world.processes[member]
    return process.life is Life.DEAD or (has_left(world, member) and process.state.completed != world.stop_step)


def _is_out(process: Process) -> bool:
    return process.life is Life.DEAD or (process.is_up and process.state.phase is Phase.PARKED)


def _stop_step(world: World) -> int | None:
    """Give the step after which a planned resize would stop all ranks: the latest that any has begun."""
    states = [world.processes[m].state for m in world.members]
    if not world.rules.resize_to or world.resizes or world.is_done:
        return None
    if any(s.generation != world.generation or s.phase not in (Phase.TRAINING, Phase.PREPARED) for s in states):
        return None
    begun: list[int] = []
    for member, state in zip(world.members, states, strict=True):
        assert state.completed is not None
        is_under_way = state.is_prepared or is_in_reduce(world.processes[member])
        begun.append(state.completed + is_under_way)
    return max(begun)


def _is_settled(world: World) -> bool:
    """Whether the new world trains, and everything that it holds is copied."""
    members = [world.processes[m] for m in world.members]
    if any(
        p.state.phase not in (Phase.TRAINING, Phase.PREPARED) or p.state.generation != world.generation for p in members
    ):
        return False
    return not any(lacks_images(world, m, p) for m, p in zip(world.members, members, strict=True))


def _dismissed(world: World, leavers: tuple[int, ...]) -> World:
    for leaver in leavers:
        world = with_dead(world, leaver)
    return replace(world, leavers=())


def _next_generation(world: World) -> World:
    """Put together who trains next. A resize that failed before it settled is undone: who was to leave is needed once more."""
    there = tuple(m for m in (*world.members, *world.leavers) if world.processes[m].is_up)
    size = len(there) if world.leavers else world.size
    if world.stop_step is not None:
        if not any(_has_failed(world, m) for m in world.members):
            size = world.rules.resize_to
        elif not world.faults:
            raise Violation("a planned change is broken off without a fault")
    stay, leavers = there[:size], there[size:]
    if "let leavers go at once" in world.rules.breaks:
        world, leavers = _dismissed(world, leavers), ()
    newcomers = tuple(range(len(world.processes), len(world.processes) + size - len(stay)))
    processes = (*world.processes, *(Process(RankState()) for _ in newcomers))
    following = replace(
        world, processes=processes, members=(*stay, *newcomers), leavers=leavers, generation=world.generation + 1, is_stopping=False,
        stop_step=None, size=size,
    )  # fmt: skip
    if following.generation > 1 + following.faults + following.resizes:
        raise Violation(f"generation {following.generation} after {following.faults} faults: nothing caused it")
    return following
