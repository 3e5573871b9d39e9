"""The states of the model: ranks with what they hold, their collectives, and the world of one instant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

from tests.sim.in_memory.rules import Rules

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
    """Where a collective stands in its generation; of each step there are four, and a mark that the last of them has ended."""

    CONNECT = 0
    AGREE = 1
    VERIFY = 2
    FIRST_STEP = 4
    ARRIVE = 1000
    HAND_OVER = 1001
    LEFT = 1002
    """No collective: the rank has left its generation as planned, together with the others."""


class InStep(IntEnum):
    """The collectives of one step."""

    REDUCE = 0
    FLAG = 1
    APPLY = 2
    """Of an optimizer that needs its peers."""
    COPY = 3
    COPIED = 4


def place_in_step(step: int, at: InStep) -> int:
    """Give the place of a collective of the step with this number, which is 0 for the last one before the model begins."""
    return Place.FIRST_STEP + 5 * step + at


class Mark(NamedTuple):
    """The last collective that a process has entered."""

    generation: int
    place: int


NO_MARK = Mark(0, -1)


class Violation(AssertionError):
    """The protocol did what it must never do."""


Held = tuple[int, History]
"""A part, and what it holds."""
Images = tuple[tuple[int, tuple[Held, ...]], ...]
_numbers: dict[tuple[object, ...], int] = {}


@dataclass(frozen=True, slots=True)
class Process:
    """A process and its rank.

    tensors: the part that they hold; images: parts by step, own ones and those of others. complete: steps of which it has ended the copies.
    gradients: the generation that reduced those of a prepared step. offer: what it told the others of its present generation; that
    outlives it. number: the same for two processes that nothing tells apart.
    """

    state: RankState
    life: Life = Life.UP
    mark: Mark = NO_MARK
    tensors: Held | None = None
    images: Images = ()
    complete: frozenset[int] = frozenset()
    gradients: int = 0
    offer: Offer | None = None
    number: int = field(init=False, compare=False, default=0)

    def __post_init__(self) -> None:
        key = self._key()
        object.__setattr__(self, "number", _numbers.setdefault(key, len(_numbers)))

    @property
    def is_up(self) -> bool:
        return self.life is Life.UP

    def _key(self) -> tuple[object, ...]:
        """Give what tells two states of a process apart. Of a dead one only what it told its peers of this generation matters."""
        said = None
        if (offer := self.offer) is not None:
            said = (offer.parts, offer.completed, offer.is_prepared, frozenset(offer.images.items()))
        if self.life is Life.DEAD:
            return (self.life, self.mark, said)
        s = self.state
        return (
            self.life, s.phase, s.generation, s.parts, s.completed, s.is_prepared, self.mark, self.tensors, self.images,
            self.complete, self.gradients if s.is_prepared else 0, said,
        )  # fmt: skip


class Resume(NamedTuple):
    """What the ranks of a generation have agreed on: the step, and the donors of each part."""

    step: int
    donors: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class World:
    """Everything at one instant. processes: of the generation on record, by rank."""

    rules: Rules
    processes: tuple[Process, ...]
    leavers: tuple[Process, ...] = ()
    """Those that a resize of a replicated state leaves out: parked, until the new world trains."""
    generation: int = 1
    is_stopping: bool = False
    stop_step: int | None = None
    """The step after which a planned change stops all ranks; None when there is none."""
    faults: int = 0
    exposed: int = 0
    """Faults since each part was last held by as many ranks as the rules say."""
    resizes: int = 0
    from_storage: bool = False
    """No step is whole in memory any more: the ranks load a checkpoint. The model ends there."""
    newest: int = 0
    """The newest step that any rank ever completed."""
    resume: Resume | None = None
    resumed: int = -1
    """The step at which the present generation begins; the first one has begun long ago."""
    key: tuple[object, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        key = (
            self._members(), tuple(sorted(p.number for p in self.leavers)), self.generation, self.is_stopping, self.stop_step, self.faults,
            self.exposed, self.resizes, self.from_storage, self.newest, self.resume if self.rules.is_sharded else None, self.resumed,
        )  # fmt: skip
        object.__setattr__(self, "key", key)

    def _members(self) -> tuple[object, ...]:
        numbers = [process.number for process in self.processes]
        if self.rules.is_sharded:
            return tuple(numbers)
        # Ranks of a replicated state differ in nothing but their number, which nothing depends on.
        donors = self.resume.donors[0][1] if self.resume is not None else ()
        of_each = [(number, rank in donors) for rank, number in enumerate(numbers)]
        return tuple(sorted(of_each) if self.rules.is_reduced else of_each)

    @property
    def size(self) -> int:
        return len(self.processes)

    def with_process(self, rank: int, process: Process) -> World:
        processes = (*self.processes[:rank], process, *self.processes[rank + 1 :])
        return World(
            self.rules, processes, self.leavers, self.generation, self.is_stopping, self.stop_step, self.faults, self.exposed, self.resizes,
            self.from_storage, self.newest, self.resume, self.resumed,
        )  # fmt: skip

    @property
    def is_done(self) -> bool:
        """Whether every member trains in the newest generation and has made all its steps."""
        return not self.is_stopping and all(
            p.is_up and self.is_in(p) and p.state.phase is Phase.TRAINING and p.state.completed == self.rules.last_step
            for p in self.processes
        )

    def is_in(self, process: Process) -> bool:
        """Whether a process has begun the present generation."""
        return process.state.generation == self.generation

    def mark(self, place: int) -> Mark:
        return Mark(self.generation, place)


class Move(NamedTuple):
    """A step from one world to the next, with what to call it. is_fault: it spends one of the faults."""

    name: str
    world: World
    is_fault: bool = False


def first_world(rules: Rules) -> World:
    """Give the world in which generation 1 has trained for a while, up to the step that is called 0 here; that is copied."""
    mark = Mark(1, place_in_step(0, InStep.COPIED))
    parts = [rules.part(rank, rules.size) for rank in range(rules.size)]
    processes = [
        Process(
            RankState(Phase.TRAINING, 1, frozenset({part}), completed=0),
            mark=mark,
            tensors=(part, ()),
        )
        for part in parts
    ]
    givers = givers_of_copies(rules, rules.size)
    if givers:
        processes = [
            replace(with_images(process, {0: {p: () for p in (parts[rank], parts[givers[rank]])}}), complete=frozenset({0}))
            for rank, process in enumerate(processes)
        ]  # fmt: skip
    return World(rules, tuple(processes))


def givers_of_copies(rules: Rules, size: int) -> Mapping[int, int]:
    """Give the rank of which each one holds the copy. Every rank is on a node of its own here."""
    return {holder: giver for giver, holder in rules.copy_holders(size).items()}


def dead(process: Process) -> Process:
    return Process(RankState(), Life.DEAD, process.mark, offer=process.offer)


def with_dead(world: World, rank: int) -> World:
    return world.with_process(rank, dead(world.processes[rank]))


def has_left(world: World, process: Process) -> bool:
    """Whether no collective that this process had not entered can succeed any more."""
    return process.life is Life.DEAD or (world.is_in(process) and process.state.phase is Phase.PARKED)


def has_failed(world: World, process: Process) -> bool:
    """Whether a process has left its generation otherwise than as planned."""
    return process.life is Life.DEAD or (has_left(world, process) and process.mark.place != Place.LEFT)


def all_entered(world: World, mark: Mark) -> bool:
    """Whether every member has entered a collective."""
    return all(process.mark >= mark for process in world.processes)


def with_images(process: Process, images: Mapping[int, Mapping[int, History]]) -> Process:
    packed = tuple((step, tuple(sorted(held.items()))) for step, held in sorted(images.items()))
    return replace(process, images=packed, state=replace(process.state, images=parts_held(images)))


def images_of(process: Process) -> dict[int, dict[int, History]]:
    return {step: dict(held) for step, held in process.images}


def parts_held(images: Mapping[int, Mapping[int, History]]) -> dict[int, frozenset[int]]:
    return {step: frozenset(held) for step, held in images.items()}


def with_offered(process: Process, images: Mapping[int, Mapping[int, History]], state: RankState) -> Process:
    """Give a process these images. Raises Violation where they are not what its rank offers."""
    done = with_images(process, images)
    if done.state.images != state.images:
        raise Violation("a rank offers images that it does not hold, or holds some that it does not offer")
    return replace(done, state=state)


def completed_tensors(rank: int, process: Process) -> Held:
    """Give the tensors after the prepared step."""
    if process.gradients < 0:
        raise Violation(f"rank {rank} completed a step on gradients of an aborted collective")
    assert process.tensors is not None
    part, history = process.tensors
    return part, (*history, process.gradients)
