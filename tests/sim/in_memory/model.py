"""A model of the in-memory protocol: ranks, their collectives, one operator, and faults, as states and steps between them.

The ranks run `elastipod.in_memory.rank` itself; the model adds what lies between them. A collective is known by its place
in the order of its generation: a rank can leave it once every member has entered it, also one that died since, and it may
fail for a rank as soon as a member is dead or has left. Both hold at once, so one rank may commit what another one saw fail:
that is what makes the protocol hard. A hung rank fails nothing (gloo does not free one that waits); it must be killed.

What tensors hold is the history of the generations that computed each step, so that two states of one step that were
computed apart differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import NamedTuple

from elastipod.in_memory.offers import Offer, Preparation
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
        return replace(self, processes=processes)

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
            _with_image_of(_with_image_of(process, process), processes[rank - 1])
            for rank, process in enumerate(processes)
        ]
    return World(rules, tuple(processes), members, size=rules.size)


def moves(world: World) -> Iterator[Move]:
    """Give everything that may happen next."""
    if world.from_storage:
        return
    for number, process in enumerate(world.processes):
        if process.life is Life.DEAD:
            continue
        if process.is_up:
            yield from _rank_moves(world, number, process)
        if world.faults < world.rules.num_faults and not world.is_done:
            yield from _faults(world, number, process)
    yield from _operator_moves(world)


# -- faults


def _faults(world: World, number: int, process: Process) -> Iterator[Move]:
    spent = replace(world, faults=world.faults + 1)
    yield Move(f"kill {number}", _dead(spent, number), is_fault=True)
    if process.is_up:
        yield Move(f"hang {number}", spent.with_process(number, replace(process, life=Life.HUNG)), is_fault=True)
        if process.state.phase is Phase.PREPARED:
            raised = replace(process, state=process.state.failed_inside_optimizer().detached(), tensors=())
            yield Move(f"raise in the optimizer of {number}", spent.with_process(number, raised), is_fault=True)


def _dead(world: World, number: int) -> World:
    process = world.processes[number]
    return world.with_process(number, Process(RankState(), Life.DEAD, process.mark, offer=process.offer))


# -- ranks


def _rank_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    match process.state.phase:
        case Phase.TRAINING | Phase.PREPARED:
            yield from _training_moves(world, number, process)
        case Phase.QUIESCED:
            if not _lacks_images(world, number, process):
                parked = replace(process, state=process.state.detached())
                yield Move(f"{number} parks", world.with_process(number, parked))
        case Phase.PARKED:
            if number in world.members and process.state.generation < world.generation and not world.is_stopping:
                state = process.state.assigned(world.generation)
                started = replace(process, state=state, mark=Mark(world.generation, Place.CONNECT))
                yield Move(f"{number} is started", world.with_process(number, started))
        case Phase.CONNECTING | Phase.AGREEING | Phase.FILLING | Phase.VERIFYING:
            yield from _joining_moves(world, number, process)
    yield from _image_moves(world, number, process)
    if _may_fail(world, process):
        yield from _stops(world, number, process, "sees its peers fail")


def _stops(world: World, number: int, process: Process, why: str) -> Iterator[Move]:
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
    alone = replace(process, state=state.completed_alone().detached(), tensors=_completed_tensors(number, process))
    done = _with_images(alone, images)
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
    if state.phase is Phase.TRAINING and not _is_in_reduce(process):
        return False
    return any(_has_left(world, m) for m in world.members)


def _has_left(world: World, member: int) -> bool:
    process = world.processes[member]
    if process.life is Life.DEAD:
        return True
    return process.state.generation == world.generation and process.state.phase in (Phase.QUIESCED, Phase.PARKED)


def _place_of_reduce(step: int) -> int:
    return Place.FIRST_STEP + 2 * step


def _is_in_reduce(process: Process) -> bool:
    completed = process.state.completed
    return completed is not None and process.mark.place == _place_of_reduce(completed)


def _training_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    rules, state = world.rules, process.state
    completed = state.completed
    assert completed is not None
    if state.phase is Phase.TRAINING and not _is_in_reduce(process):
        if world.stop_step is not None and completed >= world.stop_step:
            yield from _leaving_moves(world, number, process)
        elif completed < rules.last_step:
            entered = replace(process, mark=Mark(state.generation, _place_of_reduce(completed)))
            _require_one_history(world, number)
            yield Move(f"{number} reduces step {completed + 1}", world.with_process(number, entered))
        return
    if state.phase is Phase.TRAINING:
        is_whole = _all_entered(world, process) or (
            "trust aborted collectives" in rules.breaks and _may_fail(world, process)
        )
        if is_whole and not _lacks_images(world, number, process):
            mark = Mark(state.generation, process.mark.place + 1)
            prepared = replace(
                process, state=state.reduced(), mark=mark, gradients=_source_of_gradients(world, process)
            )
            yield Move(f"{number} is prepared", world.with_process(number, prepared))
        return
    if not rules.is_sharded or _all_entered(world, process) or "commit alone" in rules.breaks:
        yield Move(f"{number} commits step {completed + 1}", _committed(world, number, process))


def _leaving_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    """Leave a generation as planned: together, because who leaves alone breaks the last collective of the others."""
    arrived = Mark(process.state.generation, _place_of_reduce(world.rules.last_step) + 1)
    if process.mark < arrived and "leave alone" not in world.rules.breaks:
        yield Move(f"{number} arrives at the stop step", world.with_process(number, replace(process, mark=arrived)))
    elif _all_entered(world, process) or "leave alone" in world.rules.breaks:
        yield Move(
            f"{number} stops as planned", world.with_process(number, replace(process, state=process.state.stopped()))
        )


def _source_of_gradients(world: World, process: Process) -> int:
    """Give the generation that reduced the gradients; -1 when some rank's were missing."""
    return process.state.generation if _all_entered(world, process) else -1


def _committed(world: World, number: int, process: Process) -> World:
    state = process.state.committed()
    assert state.completed is not None
    tensors = _completed_tensors(number, process)
    keep = state.completed if "drop images early" in world.rules.breaks else state.completed - 1
    images = tuple((step, held) for step, held in process.images if step >= keep)
    done = replace(process, state=replace(state, images=_parts_of(images)), tensors=tensors, images=images)
    if world.rules.is_sharded:
        done = _with_image_of(done, done)
    return replace(world.with_process(number, done), newest=max(world.newest, state.completed))


def _completed_tensors(number: int, process: Process) -> tuple[tuple[int, History], ...]:
    """Give the tensors after the prepared step."""
    if process.gradients < 0:
        raise Violation(f"rank {number} completed a step on gradients of an aborted collective")
    return tuple((part, (*history, process.gradients)) for part, history in process.tensors)


def _all_entered(world: World, process: Process, mark: Mark | None = None) -> bool:
    """Whether every member of the rank's generation has entered the collective that it is in."""
    at = mark or process.mark
    if at.generation != world.generation:
        return False
    return all(world.processes[m].mark >= at for m in world.members)


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


def _lacks_images(world: World, number: int, process: Process) -> bool:
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


def _image_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    """Copy a rank to its partner. Its own image is made with the step: nothing else sees when."""
    state = process.state
    if not _lacks_images(world, number, process) or state.phase not in (Phase.TRAINING, Phase.QUIESCED):
        return
    partner = _partner(world, number)
    if world.processes[partner].is_up and world.is_member(partner) and "no copies" not in world.rules.breaks:
        yield Move(f"{number} is copied to {partner}", _imaged(world, partner, process))


def _imaged(world: World, at: int, source: Process) -> World:
    return world.with_process(at, _with_image_of(world.processes[at], source))


def _with_image_of(process: Process, source: Process) -> Process:
    step = source.state.completed
    assert step is not None
    images = {s: dict(held) for s, held in process.images}
    images.setdefault(step, {}).update(source.tensors)
    return _with_images(process, images)


def _with_images(process: Process, images: dict[int, dict[int, History]]) -> Process:
    packed = tuple((s, tuple(sorted(held.items()))) for s, held in sorted(images.items()))
    return replace(process, images=packed, state=replace(process.state, images=_parts_of(packed)))


def _parts_of(images: Images) -> dict[int, frozenset[int]]:
    return {step: frozenset(part for part, _ in held) for step, held in images}


# -- joining


def _joining_moves(world: World, number: int, process: Process) -> Iterator[Move]:
    state = process.state
    if state.generation != world.generation:
        return
    if state.phase is Phase.FILLING:
        filled = _filled(world, number, process)
        if filled is not None:
            yield Move(f"{number} is filled", world.with_process(number, filled))
        return
    if not _all_entered(world, process):
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
                world.with_process(number, _with_image_of(done, done) if world.rules.is_sharded else done),
            )
        case _:
            raise AssertionError(state.phase)


def _agreed(world: World, number: int, process: Process) -> World:
    offers = tuple(offer for m in world.members if (offer := world.processes[m].offer) is not None)
    rank = world.members.index(number)
    parts = world.rules.parts_of(rank, len(world.members))
    state = process.state.agreed(offers, rank, parts, world.rules.parts)
    if state is None:
        if world.faults < 2 or not world.rules.is_sharded:
            raise Violation(f"memory holds no step any more after {world.faults} faults")
        return replace(world, from_storage=True)
    assert state.resume is not None
    if not world.faults and state.resume.step != world.newest:
        raise Violation(f"a planned change goes back from step {world.newest} to {state.resume.step}")
    if world.newest - state.resume.step > 1:
        raise Violation(f"{world.newest - state.resume.step} steps are repeated")
    tensors = process.tensors
    if state.resume.preparations[rank] is Preparation.COMPLETE:
        tensors = _completed_tensors(number, process)
    images = {step: dict(held) for step, held in process.images if step in state.images}
    for step, held in state.images.items():
        images.setdefault(step, {}).update(
            {part: history for part, history in tensors if part in held and len(history) == step}
        )
    if state.resume.preparations[rank] is Preparation.REPLACE:
        tensors = ()
    agreed = replace(_with_images(process, images), state=state, tensors=tensors)
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


# -- the operator and the agents


def _operator_moves(world: World) -> Iterator[Move]:
    for number, process in enumerate(world.processes):
        if process.life is Life.HUNG and "leave hung ranks" not in world.rules.breaks:
            yield Move(f"the agent kills {number}, which hangs", _dead(world, number))
    if world.leavers and _is_settled(world):
        yield Move("the leavers go", _dismissed(world, world.leavers))
    if not world.is_stopping:
        if any(_has_left(world, m) for m in world.members):
            yield Move("the operator sees a fault", replace(world, is_stopping=True))
        elif (step := _stop_step(world)) is not None:
            yield Move("the operator plans a resize", replace(world, is_stopping=True, stop_step=step, resizes=1))
        return
    if world.stop_step is None or any(_has_failed(world, m) for m in world.members):
        for member in world.members:
            process = world.processes[member]
            if process.is_up and world.is_member(member) and process.state.phase is not Phase.PARKED:
                yield from _stops(world, member, process, "is stopped")
    if all(_is_out(world.processes[m]) for m in world.members):
        yield Move("the operator allocates a generation", _next_generation(world))


def _has_failed(world: World, member: int) -> bool:
    """Whether a member has left, though it did not reach the step at which all were to stop."""
    process = world.processes[member]
    return process.life is Life.DEAD or (_has_left(world, member) and process.state.completed != world.stop_step)


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
        is_under_way = state.is_prepared or _is_in_reduce(world.processes[member])
        begun.append(state.completed + is_under_way)
    return max(begun)


def _is_settled(world: World) -> bool:
    """Whether the new world trains, and everything that it holds is copied."""
    members = [world.processes[m] for m in world.members]
    if any(
        p.state.phase not in (Phase.TRAINING, Phase.PREPARED) or p.state.generation != world.generation for p in members
    ):
        return False
    return not any(_lacks_images(world, m, p) for m, p in zip(world.members, members, strict=True))


def _dismissed(world: World, leavers: tuple[int, ...]) -> World:
    for leaver in leavers:
        world = _dead(world, leaver)
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
