"""What the operator and the agents do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from tests.sim.in_memory.rank_moves import stops_of
from tests.sim.in_memory.world import (
    NO_MARK,
    InStep,
    Life,
    Move,
    Place,
    Process,
    Violation,
    World,
    dead,
    has_failed,
    has_left,
    place_in_step,
)

from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState


def operator_moves(world: World) -> Iterator[Move]:
    for rank, process in enumerate(world.processes):
        if process.life is Life.HUNG and "leave hung ranks" not in world.rules.breaks:
            yield Move(f"the agent kills {rank}, which hangs", world.with_process(rank, dead(process)))
    if world.leavers and _is_settled(world):
        yield Move("the leavers go", replace(world, leavers=()))
    if not world.is_stopping:
        if any(has_left(world, each) for each in world.processes):
            yield Move("the operator sees a fault", replace(world, is_stopping=True))
        elif (step := _stop_step(world)) is not None:
            yield Move("the operator plans a resize", replace(world, is_stopping=True, stop_step=step, resizes=1))
        return
    if world.stop_step is None or any(has_failed(world, each) for each in world.processes):
        for rank, process in enumerate(world.processes):
            if process.is_up and world.is_in(process) and process.state.phase is not Phase.PARKED:
                yield from stops_of(world, rank, process, "is stopped")
    if all(_is_out(process) for process in world.processes):
        for following in _next_generations(world):
            yield Move("the operator allocates a generation", following)


def _is_out(process: Process) -> bool:
    return process.life is Life.DEAD or (process.is_up and process.state.phase is Phase.PARKED)


def may_be_resized(world: World) -> bool:
    """Whether a planned change of size is still to come."""
    return bool(world.rules.resize_to) and not world.resizes


def _stop_step(world: World) -> int | None:
    """Give the step after which a planned resize would stop all ranks: the latest that any has begun."""
    if not may_be_resized(world) or world.is_done:
        return None
    if any(not world.is_in(p) or p.state.phase not in (Phase.TRAINING, Phase.PREPARED) for p in world.processes):
        return None
    begun: list[int] = []
    for process in world.processes:
        completed = process.state.completed
        assert completed is not None
        is_under_way = process.state.is_prepared or process.mark.place == place_in_step(completed + 1, InStep.REDUCE)
        begun.append(completed + is_under_way)
    return max(begun)


def _is_settled(world: World) -> bool:
    """Whether the new world trains. It holds all that it needs then, since its state is replicated."""
    return all(world.is_in(p) and p.state.phase in (Phase.TRAINING, Phase.PREPARED) for p in world.processes)


def _next_generations(world: World) -> Iterator[World]:
    """Put together who trains next, in each way that there is.

    A resize that failed before all had left as planned is undone: who was to leave is needed once more. So it is where a replicated state
    has leavers that wait. Sharded ones have handed their shards over, and go at once.
    """
    rules = world.rules
    has_ended = world.stop_step is not None and all(p.mark.place == Place.LEFT for p in world.processes)
    if world.stop_step is not None and not has_ended and not world.faults:
        raise Violation("a planned change is broken off without a fault")
    goes_anyway = world.stop_step is not None and "let leavers go at once" in rules.breaks
    up = [p for p in world.processes if p.is_up]
    size = rules.resize_to if has_ended or goes_anyway else world.size
    if rules.is_sharded:
        staying = world.processes[: rules.num_staying if has_ended or goes_anyway else size]
        yield _next_generation(world, [p for p in staying if p.is_up], (), size)
        return
    up += world.leavers
    size = len(up) if world.leavers else size
    numbered = {
        tuple(sorted(up[at].number for at in chosen)): chosen
        for chosen in combinations(range(len(up)), min(size, len(up)))
    }
    for chosen in numbered.values():
        leavers = tuple(p for at, p in enumerate(up) if at not in chosen)
        yield _next_generation(world, [up[at] for at in chosen], leavers, size)


def _next_generation(world: World, staying: list[Process], leavers: tuple[Process, ...], size: int) -> World:
    members = [replace(process, mark=NO_MARK, offer=None) for process in staying]
    members += [Process(RankState()) for _ in range(size - len(staying))]
    following = World(
        world.rules, tuple(members), tuple(replace(process, mark=NO_MARK, offer=None) for process in leavers),
        generation=world.generation + 1, faults=world.faults, exposed=world.exposed, resizes=world.resizes, newest=world.newest,
        resumed=world.rules.last_step,
    )  # fmt: skip
    if following.generation > 1 + following.faults + following.resizes:
        raise Violation(f"generation {following.generation} after {following.faults} faults: nothing caused it")
    return following
