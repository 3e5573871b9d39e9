"""The states of the model: ranks with what they hold, their collectives, and the world of one instant."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

from elastipod.in_memory.offers import Offer
from elastipod.in_memory.phases import Phase
from elastipod.in_memory.rank import RankState

History = tuple[int, ...]
"""The generation that computed each step, from the first on."""


class Life(StrEnum):
    """What a process is, whatever its rank believes."""

    UP = "up"
    HUNG = "hung"
    DEAD = "dead"


class Place(IntEnum):
    """Where a collective stands in its generation; of each step there are two."""

    CONNECT = 0
    AGREE = 1
    VERIFY = 2
    FIRST_STEP = 3


class Mark(NamedTuple):
    """The last collective that a process has entered."""

    generation: int
    place: int


NO_MARK = Mark(0, -1)


class Violation(AssertionError):
    """The protocol did what it must never do."""


Images = tuple[tuple[int, tuple[tuple[int, History], ...]], ...]


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its rank.

    tensors: what each part holds; images: the same by step, own ones and copies of another's. gradients: the generation that
    reduced those of a prepared step. offer: what it told the others of its present generation; that outlives it.
    """

    state: RankState
    life: Life = Life.UP
    mark: Mark = NO_MARK
    tensors: tuple[tuple[int, History], ...] = ()
    images: Images = ()
    gradients: int = 0
    offer: Offer | None = None

    @property
    def is_up(self) -> bool:
        return self.life is Life.UP

    def key(self, generation: int) -> tuple[object, ...]:
        """Give what tells two states of a process apart. Of a dead one only what it told its peers of this generation matters."""
        said = None
        if self.offer is not None and self.mark.generation == generation:
            said = (self.offer.parts, self.offer.completed, self.offer.is_prepared, tuple(self.offer.images.items()))
        mark = self.mark if self.mark.generation == generation else None
        if self.life is Life.DEAD:
            return (self.life, mark, said)
        s = self.state
        return (
            self.life, s.phase, s.generation, s.parts, s.completed, s.is_prepared, mark, self.tensors, self.images,
            self.gradients if s.is_prepared else 0, said,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rules:
    """What is modelled, and what a mutant breaks.

    size: ranks. num_parts: parts of the state; 1: every rank holds all of it (DDP), else each holds its share. last_step:
    where training ends. num_faults: how many there may be. resize_to: a planned change of size that may come at any time.
    """

    size: int = 3
    num_parts: int = 1
    last_step: int = 2
    num_faults: int = 2
    resize_to: int = 0
    breaks: frozenset[str] = frozenset()

    @property
    def is_sharded(self) -> bool:
        return self.num_parts > 1

    @property
    def num_holders(self) -> int:
        """Ranks that hold each part, at the smallest size; so many faults may take all of them."""
        return 2 if self.is_sharded else min(self.size, self.resize_to or self.size)

    @property
    def parts(self) -> frozenset[int]:
        return frozenset(range(self.num_parts))

    def parts_of(self, rank: int, size: int) -> frozenset[int]:
        """Give the parts that a rank of a world holds."""
        return frozenset(p for p in range(self.num_parts) if p % size == rank) if self.is_sharded else self.parts


@dataclass(frozen=True, slots=True)
class World:
    """Everything at one instant. members: process ids of the generation on record, by rank."""

    rules: Rules
    processes: tuple[Process, ...]
    members: tuple[int, ...]
    leavers: tuple[int, ...] = ()
    """Ranks that a resize leaves out: parked, until the new world needs nothing of theirs any more."""
    generation: int = 1
    is_stopping: bool = False
    stop_step: int | None = None
    """The step after which a planned change stops all ranks; None when there is none."""
    size: int = 0
    faults: int = 0
    resizes: int = 0
    from_storage: bool = False
    """No step is whole in memory any more: the ranks load a checkpoint. The model ends there."""
    newest: int = 0
    """The newest step that any rank ever completed."""
    key: tuple[object, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        key = (
            tuple(p.key(self.generation) for p in self.processes), self.members, self.leavers,
            self.generation, self.is_stopping, self.stop_step, self.size,
            self.faults, self.resizes, self.from_storage, self.newest,
        )  # fmt: skip
        object.__setattr__(self, "key", key)

    def with_process(self, number: int, process: Process) -> World:
        processes = (*self.processes[:number], process, *self.processes[number + 1 :])
        return World(
            self.rules, processes, self.members, self.leavers, self.generation, self.is_stopping, self.stop_step, self.size,
            self.faults, self.resizes, self.from_storage, self.newest,
        )  # fmt: skip

    def is_member(self, number: int) -> bool:
        process = self.processes[number]
        return number in self.members and process.state.generation == self.generation

    @property
    def is_done(self) -> bool:
        """Whether every member trains in the newest generation and has made all its steps."""
        return (
            not self.is_stopping
            and len(self.members) == self.size
            and all(
                self.processes[m].is_up
                and self.processes[m].state.generation == self.generation
                and self.processes[m].state.phase is Phase.TRAINING
                and self.processes[m].state.completed == self.rules.last_step
                for m in self.members
            )
        )


class Move(NamedTuple):
    """A step from one world to the next, with what to call it. is_fault: it spends one of the faults."""

    name: str
    world: World
    is_fault: bool = False


def first_world(rules: Rules) -> World:
    """Give the world in which generation 1 has trained for a while, up to the step that is called 0 here."""
    members = tuple(range(rules.size))
    processes = []
    for rank in members:
        parts = rules.parts_of(rank, rules.size)
        state = RankState(phase=Phase.TRAINING, generation=1, parts=parts, completed=0)
        processes.append(Process(state, mark=Mark(1, Place.VERIFY), tensors=tuple((p, ()) for p in sorted(parts))))
    if rules.is_sharded:
        processes = [
            with_image_of(with_image_of(process, process), processes[rank - 1])
            for rank, process in enumerate(processes)
        ]
    return World(rules, tuple(processes), members, size=rules.size)


def with_dead(world: World, number: int) -> World:
    process = world.processes[number]
    return world.with_process(number, Process(RankState(), Life.DEAD, process.mark, offer=process.offer))


def has_left(world: World, member: int) -> bool:
    process = world.processes[member]
    if process.life is Life.DEAD:
        return True
    return process.state.generation == world.generation and process.state.phase in (Phase.QUIESCED, Phase.PARKED)


def all_entered(world: World, process: Process, mark: Mark | None = None) -> bool:
    """Whether every member of the rank's generation has entered the collective that it is in."""
    at = mark or process.mark
    if at.generation != world.generation:
        return False
    return all(world.processes[m].mark >= at for m in world.members)


def with_image_of(process: Process, source: Process) -> Process:
    step = source.state.completed
    assert step is not None
    images = {s: dict(held) for s, held in process.images}
    images.setdefault(step, {}).update(source.tensors)
    return with_images(process, images)


def with_images(process: Process, images: dict[int, dict[int, History]]) -> Process:
    packed = tuple((s, tuple(sorted(held.items()))) for s, held in sorted(images.items()))
    return replace(process, images=packed, state=replace(process.state, images=parts_of(packed)))


def parts_of(images: Images) -> dict[int, frozenset[int]]:
    return {step: frozenset(part for part, _ in held) for step, held in images}


def completed_tensors(number: int, process: Process) -> tuple[tuple[int, History], ...]:
    """Give the tensors after the prepared step."""
    if process.gradients < 0:
        raise Violation(f"rank {number} completed a step on gradients of an aborted collective")
    return tuple((part, (*history, process.gradients)) for part, history in process.tensors)
