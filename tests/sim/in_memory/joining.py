"""How ranks join a generation: they connect, agree on a step, and fill each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.in_memory.copies import settled_when_filled
from tests.sim.in_memory.world import (
    Held,
    History,
    Move,
    Place,
    Process,
    Resume,
    Violation,
    World,
    all_entered,
    completed_tensors,
    images_of,
    with_offered,
)

from elastipod.in_memory.offers import Preparation
from elastipod.in_memory.parts import place_of
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.shard_plan import newest_layout


def joining_moves(world: World, rank: int, process: Process) -> Iterator[Move]:
    state = process.state
    if state.phase is Phase.FILLING:
        filled = _filled(world, rank, process)
        if filled is not None:
            yield Move(f"{rank} is filled", settled_when_filled(world.with_process(rank, filled)))
        return
    if not all_entered(world, process.mark):
        return
    match state.phase:
        case Phase.CONNECTING:
            connected = replace(process, state=state.connected(), mark=world.mark(Place.AGREE), offer=state.offer())
            yield Move(f"{rank} is connected", world.with_process(rank, connected))
        case Phase.AGREEING:
            yield Move(f"{rank} agrees", _agreed(world, rank, process))
        case Phase.VERIFYING:
            done = replace(process, state=state.verified())
            yield Move(f"{rank} trains", world.with_process(rank, done))
        case _:
            raise AssertionError(state.phase)


def _agreed(world: World, rank: int, process: Process) -> World:
    rules, size = world.rules, world.size
    offers = tuple(offer for each in world.processes if (offer := each.offer) is not None)
    assert len(offers) == size, "every rank has entered the agreement with its offer"
    layout = newest_layout(offers, prefer=rules.num_shards(size)) if rules.is_sharded else 0
    part = rules.part(rank, size)
    state = None if layout is None else process.state.agreed(offers, rank, frozenset({part}), rules.layout(layout))
    if state is None:
        if world.exposed < rules.num_holders:
            raise Violation(f"memory holds no step any more after {world.exposed} faults")
        return replace(world, from_storage=True)
    resume = state.resume
    assert resume is not None
    _require_near(world, resume.step)
    tensors = process.tensors
    if resume.preparations[rank] is Preparation.COMPLETE:
        tensors = completed_tensors(rank, process)
    images = {step: held for step, held in images_of(process).items() if step in state.images}
    if tensors is not None:
        held, history = tensors
        for step, parts in state.images.items():
            if held in parts and len(history) == step:
                images.setdefault(step, {})[held] = history
    if resume.preparations[rank] is Preparation.REPLACE:
        tensors = None
    agreed = with_offered(replace(process, tensors=tensors), images, state)
    donors = Resume(resume.step, tuple(sorted(resume.donors.items())))
    newest = max(world.newest, resume.step)
    return replace(world.with_process(rank, agreed), newest=newest, resume=donors, resumed=resume.step)


def _require_near(world: World, step: int) -> None:
    """A planned change repeats nothing, and a crash at most what the copies allow."""
    if not world.faults and step != world.newest:
        raise Violation(f"a planned change goes back from step {world.newest} to {step}")
    if world.exposed < world.rules.num_holders and world.newest - step > world.rules.most_repeated:
        raise Violation(f"{world.newest - step} steps are repeated")


def _filled(world: World, rank: int, process: Process) -> Process | None:
    """Give the rank with all that it needs; None while a part has no donor that is there."""
    assert world.resume is not None
    step, donors = world.resume
    part = world.rules.part(rank, world.size)
    found: set[History] = set()
    for needed, ranks in donors:
        if not _overlap(needed, part):
            continue
        given = {held for each in ranks if (held := _given(world.processes[each], needed, step)) is not None}
        if not given:
            return None
        found |= given
    if len(found) > 1:
        raise Violation(f"donors of part {part} at step {step} differ: {sorted(found)}")
    tensors: Held = (part, found.pop())
    state = process.state.filled(frozenset({part}))
    return replace(process, state=state, tensors=tensors, mark=world.mark(Place.VERIFY))


def _overlap(former: int, new: int) -> bool:
    """Whether a part of a former layout has something of a part of a new one."""
    (of_former, at_former), (of_new, at_new) = place_of(former), place_of(new)
    if not of_former:
        return True
    return at_former * of_new < (at_new + 1) * of_former and at_new * of_former < (at_former + 1) * of_new


def _given(donor: Process, part: int, step: int) -> History | None:
    """Give what a donor has of a part, from its tensors or from an image; None when it is not there to give."""
    if not donor.is_up or donor.state.phase not in (Phase.FILLING, Phase.VERIFYING):
        return None
    if donor.tensors is not None and donor.tensors[0] == part and len(donor.tensors[1]) == step:
        return donor.tensors[1]
    return dict(dict(donor.images).get(step, ())).get(part)
