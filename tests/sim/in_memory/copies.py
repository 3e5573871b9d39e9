"""Copies of shards: when they are due, when a rank has ended them, and which images stay until then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.in_memory.world import (
    InStep,
    Move,
    Place,
    Process,
    World,
    givers_of_copies,
    images_of,
    place_in_step,
    with_images,
)

from elastipod.in_memory.shard_plan import newest_copied


def is_due(world: World, step: int) -> bool:
    """Whether a completed step is copied before the next one begins: the first one of a world, and each k-th one."""
    if not world.rules.copy_holders(world.size):
        return False
    return step == world.resumed + 1 or step % world.rules.every == 0


def copying_moves(world: World, rank: int, process: Process) -> Iterator[Move]:
    """End the copies of a step: this rank has what it holds for another one, and its own holder takes part."""
    step = process.state.completed
    assert step is not None
    place = world.mark(place_in_step(step, InStep.COPY))
    giver, holder = givers_of_copies(world.rules, world.size)[rank], world.rules.copy_holders(world.size)[rank]
    if world.processes[giver].mark < place or world.processes[holder].mark < place:
        return
    assert process.tensors is not None
    own, history = process.tensors
    images = images_of(process)
    # A copy is of the same history as its holder: those who train one step have one.
    images.setdefault(step, {}).update({own: history, world.rules.part(giver, world.size): history})
    mark = world.mark(place_in_step(step, InStep.COPIED))
    done = replace(with_images(process, images), mark=mark, complete=process.complete | {step})
    yield Move(f"{rank} ends the copies of step {step}", _settled(world.with_process(rank, done)))


def keep_from(world: World, process: Process) -> int | None:
    """Give what `ShardCopies.newest` gives, when a step is committed or the world is left as planned."""
    completed, images = process.state.completed, process.state.images
    assert completed is not None
    knows_holders = completed > world.resumed
    if not world.rules.every or not images or (knows_holders and not world.rules.copy_holders(world.size)):
        return None
    if "drop images before the copies end" in world.rules.breaks:
        return None
    return newest_copied(images, process.complete)


def _settled(world: World) -> World:
    """When all have ended their first copies, the loss of one rank costs no state any more, whatever happened before."""
    first = world.mark(place_in_step(world.resumed + 1, InStep.COPIED))
    if not world.exposed or not all(p.is_up and p.mark >= first for p in world.processes):
        return world
    return replace(world, exposed=0)


def settled_when_filled(world: World) -> World:
    """Where several ranks hold each part, a world is whole as soon as all of them are filled."""
    rules, mark = world.rules, world.mark(Place.VERIFY)
    num_replicas = world.size // max(1, rules.num_shards(world.size))
    if num_replicas < rules.num_holders or not all(p.is_up and p.mark >= mark for p in world.processes):
        return world
    return replace(world, exposed=0) if world.exposed else world
