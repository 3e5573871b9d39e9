"""How ranks join a generation: they connect, agree on a step, and fill each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.in_memory.world import (
    History,
    Mark,
    Move,
    Place,
    Process,
    Violation,
    World,
    all_entered,
    completed_tensors,
    with_image_of,
    with_images,
)

from elastipod.in_memory.offers import Preparation
from elastipod.in_memory.phases import Phase


def joining_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    state = process.state
    if state.generation != world.generation:
        return
    if state.phase is Phase.FILLING:
        filled = _filled(world, number, process)
        if filled is not None:
            yield Move(f"{number} is filled", world.with_process(number, filled))
        return
    if not all_entered(world, process):
        return
    match state.phase:
        case Phase.CONNECTING:
            mark = Mark(state.generation, Place.AGREE)
            connected = replace(process, state=state.connected(), mark=mark, offer=state.offer())
            yield Move(f"{number} is connected", world.with_process(number, connected))
        case Phase.AGREEING:
            yield Move(f"{number} agrees", _agreed(world, number, process))
        case Phase.VERIFYING:
            done = replace(process, state=state.verified(), offer=None)
            yield Move(
                f"{number} trains",
                world.with_process(number, with_image_of(done, done) if world.rules.is_sharded else done),
            )
        case _:
            raise AssertionError(state.phase)


def _agreed(world: World, number: int, process: Process) -> World:
    offers = tuple(offer for m in world.members if (offer := world.processes[m].offer) is not None)
    rank = world.members.index(number)
    parts = world.rules.parts_of(rank, len(world.members))
    state = process.state.agreed(offers, rank, parts, world.rules.parts)
    if state is None:
        if world.faults < world.rules.num_holders:
            raise Violation(f"memory holds no step any more after {world.faults} faults")
        return replace(world, from_storage=True)
    assert state.resume is not None
    if not world.faults and state.resume.step != world.newest:
        raise Violation(f"a planned change goes back from step {world.newest} to {state.resume.step}")
    if world.newest - state.resume.step > 1:
        raise Violation(f"{world.newest - state.resume.step} steps are repeated")
    tensors = process.tensors
    if state.resume.preparations[rank] is Preparation.COMPLETE:
        tensors = completed_tensors(number, process)
    images = {step: dict(held) for step, held in process.images if step in state.images}
    for step, held in state.images.items():
        images.setdefault(step, {}).update(
            {part: history for part, history in tensors if part in held and len(history) == step}
        )
    if state.resume.preparations[rank] is Preparation.REPLACE:
        tensors = ()
    agreed = replace(with_images(process, images), state=state, tensors=tensors)
    return replace(world.with_process(number, agreed), newest=max(world.newest, state.resume.step))


def _filled(world: World, number: int, process: Process) -> Process | None:
    """Give the rank with all that it needs; None while a part has no donor that is there."""
    resume = process.state.resume
    assert resume is not None
    tensors: list[tuple[int, History]] = []
    parts = world.rules.parts_of(world.members.index(number), len(world.members))
    for part in sorted(parts):
        found = {
            held
            for rank in resume.donors[part]
            if (held := _given(world.processes[world.members[rank]], part, resume.step)) is not None
        }
        if not found:
            return None
        if len(found) > 1:
            raise Violation(f"donors of part {part} at step {resume.step} differ: {sorted(found)}")
        tensors.append((part, found.pop()))
    mark = Mark(process.state.generation, Place.VERIFY)
    return replace(process, state=process.state.filled(parts), tensors=tuple(tensors), mark=mark)


def _given(donor: Process, part: int, step: int) -> History | None:
    """Give what a donor has of a part, from its tensors or from an image; None when it is not there to give."""
    if not donor.is_up or donor.state.phase not in (Phase.FILLING, Phase.VERIFYING):
        return None
    held = dict(donor.tensors).get(part)
    if held is not None and len(held) == step:
        return held
    return dict(dict(donor.images).get(step, ())).get(part)
