"""How ranks leave a generation as planned: together, and not before those who stay hold all that leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.sim.in_memory.copies import keep_from
from tests.sim.in_memory.world import (
    Move,
    Place,
    Process,
    World,
    all_entered,
    images_of,
    with_images,
)

from elastipod.in_memory.shard_plan import receivers_of_parts, second_holders


def leaving_moves(world: World, rank: int, process: Process) -> Iterator[Move]:
    """Go on at the stop step: say what becomes of this rank, hand shards over, and leave when all have ended that.

    Who leaves alone breaks the last collective of the others.
    """
    rules = world.rules
    if not all_entered(world, process.mark) and "leave alone" not in rules.breaks:
        leaves_early = process.mark.place == Place.HAND_OVER and rank >= rules.num_staying
        if not (leaves_early and "leave before the hand-over ends" in rules.breaks):
            return
    if rules.is_sharded and process.mark.place == Place.ARRIVE:
        yield Move(f"{rank} hands over", world.with_process(rank, _without_older_images(world, process)))
        return
    taken = _with_taken(world, rank, process) if rules.is_sharded else process
    mark = world.mark(Place.LEFT) if all_entered(world, process.mark) else process.mark
    left = replace(taken, state=taken.state.stopped().detached(), mark=mark)
    yield Move(f"{rank} stops as planned", world.with_process(rank, left))


def _without_older_images(world: World, process: Process) -> Process:
    """Begin to hand over: all ranks have stopped, so all have ended the copies of the newest copied step."""
    newest = keep_from(world, process)
    images = images_of(process)
    if newest is not None:
        images = {step: held for step, held in images.items() if step >= newest}
    return replace(with_images(process, images), mark=world.mark(Place.HAND_OVER))


def _with_taken(world: World, rank: int, process: Process) -> Process:
    """Keep what this rank has been given: when all have ended, and no sooner."""
    parts = handed_over(world)[rank]
    if not parts:
        return process
    assert process.tensors is not None
    assert process.state.completed is not None
    _, history = process.tensors  # that of all ranks
    images = images_of(process)
    images.setdefault(process.state.completed, {}).update(dict.fromkeys(parts, history))
    return with_images(process, images)


def handed_over(world: World) -> list[list[int]]:
    """Give the parts that each rank takes in a planned change, as `ShardedMemory.hand_over` does."""
    rules, size = world.rules, world.size
    staying = list(range(rules.num_staying))
    kept = {rules.part(rank, size) for rank in staying}
    leaving = {rules.part(rank, size): rank for rank in range(len(staying), size)}
    orphans = {part: rank for part, rank in leaving.items() if part not in kept}
    takers = receivers_of_parts(orphans, staying, rules.num_shards(size))
    taken = list(takers.items())
    if leaving and rules.every and "no second holders" not in rules.breaks:
        holders = [(rules.part(rank, size), rank) for rank in staying] + taken
        taken += second_holders(holders, staying).items()
    return [sorted(part for part, taker in taken if taker == rank) for rank in range(size)]
