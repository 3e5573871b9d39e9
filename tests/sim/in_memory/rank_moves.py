"""What ranks do: they train, are copied to each other, and leave their generation because others fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.in_memory.copies import copying_moves, is_due, keep_from
from tests.sim.in_memory.joining import joining_moves
from tests.sim.in_memory.planned_stop import leaving_moves
from tests.sim.in_memory.rules import Optimizer
from tests.sim.in_memory.world import (
    InStep,
    Mark,
    Move,
    Place,
    Process,
    Violation,
    World,
    all_entered,
    completed_tensors,
    has_failed,
    has_left,
    images_of,
    parts_held,
    place_in_step,
    with_images,
    with_offered,
)

from elastipod.in_memory.phases import Phase


def rank_moves(world: World, rank: int, process: Process) -> Iterator[Move]:
    match process.state.phase:
        case Phase.TRAINING:
            yield from _training_moves(world, rank, process)
        case Phase.PREPARED:
            yield from _committing_moves(world, rank, process)
        case Phase.PARKED:
            if process.state.generation < world.generation and not world.is_stopping:
                state = process.state.assigned(world.generation)
                started = replace(process, state=state, mark=world.mark(Place.CONNECT))
                yield Move(f"{rank} is started", world.with_process(rank, started))
        case Phase.CONNECTING | Phase.AGREEING | Phase.FILLING | Phase.VERIFYING:
            yield from joining_moves(world, rank, process)
    if _may_fail(world, process):
        yield from stops_of(world, rank, process, "sees its peers fail")


def stops_of(world: World, rank: int, process: Process, why: str) -> Iterator[Move]:
    """Stop a rank. Nothing can come between the end of its groups and the barrier that matters to anybody else.

    A prepared rank of sharded state completes its step without a world, and keeps the state before; or its optimizer needs its peers
    and fails, so that only the state before is left.
    """
    state = process.state.stopped()
    if not (world.rules.is_sharded and state.is_prepared):
        yield Move(f"{rank} {why}", world.with_process(rank, replace(process, state=state.detached())))
        return
    if world.rules.optimizer is not Optimizer.ALONE:
        undone = replace(process, state=replace(state, is_prepared=False).detached())
        yield Move(f"{rank} {why} and cannot complete its step alone", world.with_process(rank, undone))
    if world.rules.optimizer is Optimizer.NEEDS_PEERS:
        return
    images = images_of(process)
    assert state.completed is not None
    assert process.tensors is not None
    part, history = process.tensors
    images.setdefault(state.completed, {})[part] = history
    completed = replace(process, tensors=completed_tensors(rank, process))
    done = with_offered(completed, images, state.completed_alone().detached())
    # It is not the newest step yet: that it is only when all agree on it, as on a prepared one.
    yield Move(f"{rank} {why} and completes its step alone", world.with_process(rank, done))


def _may_fail(world: World, process: Process) -> bool:
    """Whether what the rank waits for may fail. One that computes sees it at its next collective."""
    phase = process.state.phase
    if phase is Phase.PARKED or (phase is Phase.TRAINING and not is_in_collective(process)):
        return False
    if process.mark.place in (Place.ARRIVE, Place.HAND_OVER):
        # Who has left as planned has given all that it had to.
        return any(has_failed(world, each) for each in world.processes)
    return any(has_left(world, each) for each in world.processes)


def is_in_collective(process: Process) -> bool:
    """Whether a rank that trains waits for others, where another one computes."""
    if process.mark.place >= Place.ARRIVE:
        return True
    completed = process.state.completed
    assert completed is not None
    return process.mark.place in (place_in_step(completed, InStep.COPY), place_in_step(completed + 1, InStep.REDUCE))


def _training_moves(world: World, rank: int, process: Process) -> Iterator[Move]:
    """Go on in the order of a step: copies of the last one, the stop of a planned change, or the next gradients."""
    completed, place = process.state.completed, process.mark.place
    assert completed is not None
    copy = place_in_step(completed, InStep.COPY)
    if place >= Place.ARRIVE:
        yield from leaving_moves(world, rank, process)
    elif place == copy:
        yield from copying_moves(world, rank, process)
    elif place == place_in_step(completed + 1, InStep.REDUCE):
        yield from _preparing_moves(world, rank, process)
    elif place < copy and is_due(world, completed) and completed > world.resumed:
        yield Move(f"{rank} copies step {completed}", _entered(world, rank, process, copy))
    elif world.stop_step is not None and completed >= world.stop_step:
        yield Move(f"{rank} arrives at the stop step", _entered(world, rank, process, Place.ARRIVE))
    elif completed < world.rules.last_step:
        _require_one_history(world, rank)
        entered = _entered(world, rank, process, place_in_step(completed + 1, InStep.REDUCE))
        yield Move(f"{rank} reduces step {completed + 1}", entered)


def _entered(world: World, rank: int, process: Process, place: int) -> World:
    return world.with_process(rank, replace(process, mark=world.mark(place)))


def _preparing_moves(world: World, rank: int, process: Process) -> Iterator[Move]:
    is_whole = all_entered(world, process.mark)
    if is_whole or ("trust aborted collectives" in world.rules.breaks and _may_fail(world, process)):
        assert process.state.completed is not None
        mark = Mark(world.generation, place_in_step(process.state.completed + 1, InStep.FLAG))
        gradients = world.generation if is_whole else -1
        prepared = replace(process, state=process.state.reduced(), mark=mark, gradients=gradients)
        yield Move(f"{rank} is prepared", world.with_process(rank, prepared))


def _committing_moves(world: World, rank: int, process: Process) -> Iterator[Move]:
    rules = world.rules
    completed = process.state.completed
    assert completed is not None
    if rules.is_sharded and not all_entered(world, process.mark) and "commit alone" not in rules.breaks:
        return
    apply = place_in_step(completed + 1, InStep.APPLY)
    if rules.optimizer is Optimizer.NEEDS_PEERS and process.mark.place < apply:
        yield Move(f"{rank} runs its optimizer", _entered(world, rank, process, apply))
    else:
        yield _commit(world, rank, process)


def _commit(world: World, rank: int, process: Process) -> Move:
    rules = world.rules
    state = process.state.committed(keep_from(world, process) if rules.is_sharded else None)
    assert state.completed is not None
    images = {step: held for step, held in images_of(process).items() if step in state.images}
    if not rules.is_sharded:
        images = {}  # all others are at the step before, or filled from this one
    if "keep no image of the last step" in rules.breaks:
        images = {step: held for step, held in images.items() if step >= state.completed}
    done = replace(process, state=replace(state, images=parts_held(images)), tensors=completed_tensors(rank, process))
    committed = world.with_process(rank, with_images(done, images))
    newest = max(world.newest, state.completed)
    return Move(f"{rank} commits step {state.completed}", replace(committed, newest=newest))


def _require_one_history(world: World, rank: int) -> None:
    """Whoever computes one step together must have computed all steps before it together."""
    mine = world.processes[rank]
    for other, process in enumerate(world.processes):
        if not process.is_up or not world.is_in(process) or process.state.phase is not Phase.TRAINING:
            continue
        assert mine.tensors is not None
        assert process.tensors is not None
        if process.state.completed == mine.state.completed and process.tensors[1] != mine.tensors[1]:
            raise Violation(f"ranks {rank} and {other} train step {mine.state.completed} of different histories")
