"""What ranks do: they train, are copied to each other, and leave their generation, as planned or because others fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.in_memory.joining import joining_moves
from tests.sim.in_memory.world import (
    Life,
    Mark,
    Move,
    Place,
    Process,
    Violation,
    World,
    all_entered,
    completed_tensors,
    has_left,
    parts_of,
    with_image_of,
    with_images,
)

from elastipod.in_memory.phases import Phase


def rank_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    match process.state.phase:
        case Phase.TRAINING | Phase.PREPARED:
            yield from _training_moves(world, number, process)
        case Phase.QUIESCED:
            if not lacks_images(world, number, process):
                parked = replace(process, state=process.state.detached())
                yield Move(f"{number} parks", world.with_process(number, parked))
        case Phase.PARKED:
            if number in world.members and process.state.generation < world.generation and not world.is_stopping:
                state = process.state.assigned(world.generation)
                started = replace(process, state=state, mark=Mark(world.generation, Place.CONNECT))
                yield Move(f"{number} is started", world.with_process(number, started))
        case Phase.CONNECTING | Phase.AGREEING | Phase.FILLING | Phase.VERIFYING:
            yield from joining_moves(world, number, process)
    yield from image_moves(world, number, process)
    if _may_fail(world, process):
        yield from stops_of(world, number, process, "sees its peers fail")


def stops_of(world: World, number: int, process: Process, why: str) -> Iterator[Move]:
    """Stop a rank. Nothing can come between the end of its groups and the barrier that matters to anybody else.

    A prepared rank of sharded state completes its step without a world, and keeps the state before; or its optimizer needs its peers
    and fails, so that only the state before is left.
    """
    state = process.state if process.state.phase is Phase.QUIESCED else process.state.stopped()
    if not (world.rules.is_sharded and state.is_prepared):
        yield Move(f"{number} {why}", world.with_process(number, replace(process, state=state.detached())))
        return
    undone = replace(process, state=replace(state, is_prepared=False).detached())
    yield Move(f"{number} {why} and cannot complete its step alone", world.with_process(number, undone))
    images = {step: dict(held) for step, held in process.images}
    assert state.completed is not None
    images.setdefault(state.completed, {}).update(process.tensors)
    alone = replace(process, state=state.completed_alone().detached(), tensors=completed_tensors(number, process))
    done = with_images(alone, images)
    if done.state.images != alone.state.images:
        raise Violation(f"rank {number} offers images that it does not hold, or holds some that it does not offer")
    # It is not the newest step yet: that it is only when all agree on it, as on a prepared one.
    yield Move(f"{number} {why} and completes its step alone", world.with_process(number, done))


def _may_fail(world: World, process: Process) -> bool:
    """Whether what the rank waits for, or does next, may fail."""
    state = process.state
    if state.phase in (Phase.QUIESCED, Phase.PARKED):
        return False
    if state.generation < world.generation:
        return True  # left behind: its peers have gone on without it
    if state.phase is Phase.TRAINING and not is_in_reduce(process):
        return False
    return any(has_left(world, m) for m in world.members)


def _place_of_reduce(step: int) -> int:
    return Place.FIRST_STEP + 2 * step


def is_in_reduce(process: Process) -> bool:
    completed = process.state.completed
    return completed is not None and process.mark.place == _place_of_reduce(completed)


def _training_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    rules, state = world.rules, process.state
    completed = state.completed
    assert completed is not None
    if state.phase is Phase.TRAINING and not is_in_reduce(process):
        if world.stop_step is not None and completed >= world.stop_step:
            yield from _leaving_moves(world, number, process)
        elif completed < rules.last_step:
            entered = replace(process, mark=Mark(state.generation, _place_of_reduce(completed)))
            _require_one_history(world, number)
            yield Move(f"{number} reduces step {completed + 1}", world.with_process(number, entered))
        return
    if state.phase is Phase.TRAINING:
        is_whole = all_entered(world, process) or (
            "trust aborted collectives" in rules.breaks and _may_fail(world, process)
        )
        if is_whole and not lacks_images(world, number, process):
            mark = Mark(state.generation, process.mark.place + 1)
            prepared = replace(
                process, state=state.reduced(), mark=mark, gradients=_source_of_gradients(world, process)
            )
            yield Move(f"{number} is prepared", world.with_process(number, prepared))
        return
    if not rules.is_sharded or all_entered(world, process) or "commit alone" in rules.breaks:
        yield Move(f"{number} commits step {completed + 1}", _committed(world, number, process))


def _leaving_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    """Leave a generation as planned: together, because who leaves alone breaks the last collective of the others."""
    arrived = Mark(process.state.generation, _place_of_reduce(world.rules.last_step) + 1)
    if process.mark < arrived and "leave alone" not in world.rules.breaks:
        yield Move(f"{number} arrives at the stop step", world.with_process(number, replace(process, mark=arrived)))
    elif all_entered(world, process) or "leave alone" in world.rules.breaks:
        yield Move(
            f"{number} stops as planned", world.with_process(number, replace(process, state=process.state.stopped()))
        )


def _source_of_gradients(world: World, process: Process) -> int:
    """Give the generation that reduced the gradients; -1 when some rank's were missing."""
    return process.state.generation if all_entered(world, process) else -1


def _committed(world: World, number: int, process: Process) -> World:
    state = process.state.committed()
    assert state.completed is not None
    tensors = completed_tensors(number, process)
    keep = state.completed if "drop images early" in world.rules.breaks else state.completed - 1
    images = tuple((step, held) for step, held in process.images if step >= keep)
    done = replace(process, state=replace(state, images=parts_of(images)), tensors=tensors, images=images)
    if world.rules.is_sharded:
        done = with_image_of(done, done)
    return replace(world.with_process(number, done), newest=max(world.newest, state.completed))


def _require_one_history(world: World, number: int) -> None:
    """Whoever computes one step together must have computed all steps before it together."""
    mine = world.processes[number]
    for other in world.members:
        process = world.processes[other]
        if (
            process.is_up
            and process.state.generation == mine.state.generation
            and process.state.phase is Phase.TRAINING
        ):
            histories = {h for _, h in (*mine.tensors, *process.tensors) if len(h) == mine.state.completed}
            if process.state.completed == mine.state.completed and len(histories) > 1:
                raise Violation(f"ranks {number} and {other} train step {mine.state.completed} of different histories")


# -- memory images: of each step, an own one and one in the memory of the next rank


def _partner(world: World, number: int) -> int:
    return world.members[(world.members.index(number) + 1) % len(world.members)]


def lacks_images(world: World, number: int, process: Process) -> bool:
    """Whether a rank must still be copied before it may go on to the next step, or leave as planned."""
    state = process.state
    if (
        not world.rules.is_sharded
        or state.completed is None
        or not world.is_member(number)
        or "no copies" in world.rules.breaks
    ):
        return False
    partner = world.processes[_partner(world, number)]
    if partner.life is Life.DEAD:
        return False  # that will be seen
    return not _holds(partner, state.completed, state.parts)


def _holds(process: Process, step: int, parts: frozenset[int]) -> bool:
    return parts <= frozenset(part for part, _ in dict(process.images).get(step, ()))


def image_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    """Copy a rank to its partner. Its own image is made with the step: nothing else sees when."""
    state = process.state
    if not lacks_images(world, number, process) or state.phase not in (Phase.TRAINING, Phase.QUIESCED):
        return
    partner = _partner(world, number)
    if world.processes[partner].is_up and world.is_member(partner) and "no copies" not in world.rules.breaks:
        yield Move(f"{number} is copied to {partner}", _imaged(world, partner, process))


def _imaged(world: World, at: int, source: Process) -> World:
    return world.with_process(at, with_image_of(world.processes[at], source))
