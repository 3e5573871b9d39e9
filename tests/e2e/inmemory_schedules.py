"""What happens to a job in memory, drawn from a seed, and what its ranks left when it has ended."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.inmemory_slots import Ended, Resize

from elastipod.audit.log_reader import LoggedGeneration, read_logs
from elastipod.audit.report import AuditReport, audit
from elastipod.chaos import FOLLOWER, FaultKind, Moment, PlannedFault

STEPS = 24
MAX_SIZE = 6
JOINED = re.compile(r"pid (\d+) generation (\d+) rank (\d+) of (\d+) after step (\d+)")
HAPPENED = re.compile(r"chaos: (\w+) at (\w+), rank")
KINDS_AT = [(at, kind) for at in Moment for kind in FaultKind]
# What travels of one kind of state only.
ONLY_STATE = {Moment.COPY: "sharded", Moment.HAND_OVER: "sharded", Moment.FOLLOWING: "replicated"}
BETWEEN_GENERATIONS = (Moment.CONNECTING, Moment.AGREEING, Moment.FILLING, Moment.VERIFYING)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The size that a job begins with, its planned changes, and the faults on the way. agents_begin: what follows a planned change is told
    before it, and agents begin it by themselves.
    """

    size: int
    resizes: tuple[Resize, ...]
    faults: tuple[PlannedFault, ...]
    agents_begin: bool

    @property
    def newcomers_follow(self) -> bool:
        """Whether those that come in a planned change follow the others before it."""
        grows = bool(self.resizes) and self.resizes[0].size > self.size
        return grows and any(fault.at is Moment.FOLLOWING for fault in self.faults)


def steps_between_copies(seed: int) -> int:
    """Give how often shards are copied in a schedule of sharded state."""
    return 1 + seed % 3


def place_of(seed: int) -> int:
    """Give the place in KINDS_AT of the fault that a seed's schedule is for."""
    return seed % len(KINDS_AT)


def draw(seed: int, state: str = "replicated") -> Schedule:
    """Draw a schedule for a state that the seed's fault is possible in. Seeds in a row go through all moments and kinds; the rest is left
    to chance.
    """
    rng = random.Random(seed)
    sizes = [rng.choices(range(2, MAX_SIZE + 1), weights=(8, 6, 4, 1, 1))[0] for _ in range(3)]
    changes = sorted(rng.sample(range(3, STEPS - 3), rng.randint(0, 2)))
    resizes = [Resize(at, size) for at, size in zip(changes, sizes[1:], strict=False)]
    at, kind = KINDS_AT[place_of(seed)]
    if at is Moment.HAND_OVER:
        sizes[0] = rng.randint(3, MAX_SIZE)
        resizes = [Resize(rng.randint(3, STEPS - 4), rng.randint(-(-sizes[0] // 2), sizes[0] - 1))]
    if at is Moment.FOLLOWING:
        sizes[0] = rng.randint(2, 3)
        resizes = [Resize(rng.randint(14, STEPS - 4), sizes[0] + rng.randint(1, 2))]
    faults = [_fault(rng, seed, at, kind, sizes[0])]
    if at in BETWEEN_GENERATIONS and not resizes:
        faults.append(_fault(rng, seed, Moment.BACKWARD, FaultKind.KILL, sizes[0]))  # there is another generation then
    elif rng.random() < 0.3:
        possible = [(at, kind) for at, kind in KINDS_AT if ONLY_STATE.get(at, state) == state]
        faults.append(_fault(rng, seed, *rng.choice(possible), sizes[0]))
    return Schedule(sizes[0], tuple(resizes), tuple(faults), agents_begin=rng.random() < 0.7)


def _fault(rng: random.Random, seed: int, at: Moment, kind: FaultKind, size: int) -> PlannedFault:
    """Draw rank and step. size: of the first world."""
    rank = rng.randrange(2)
    if at is Moment.HAND_OVER:
        return PlannedFault(kind, at, rng.randrange(size))
    if at is Moment.COPY:  # not the first one: nothing would be there to go back to
        every = steps_between_copies(seed)
        return PlannedFault(kind, at, rank, step=every * rng.randint(2, STEPS // every))
    if at is Moment.FOLLOWING:  # the first newcomer follows rank 0
        return PlannedFault(kind, at, rng.choice((0, FOLLOWER)), step=rng.randint(8, 14))
    if at in BETWEEN_GENERATIONS:
        return PlannedFault(kind, at, rank, from_generation=2)
    return PlannedFault(kind, at, rank, step=rng.randint(2, STEPS))


def steps_given_up(generations: Mapping[int, LoggedGeneration]) -> dict[int, int]:
    """Give, for each generation that has made steps, how many steps of the one before it went back.

    The audit counts steps where they are made again. A generation may end before it has made all of them again, and the next one then
    makes those that a fault of long ago has cost.
    """
    found: dict[int, int] = {}
    reached = 0
    for number, generation in sorted(generations.items()):
        if generation.steps:
            found[number] = max(0, reached - generation.start.resumed_step)
            reached = max(generation.steps)
    return found


class Played:
    """A job that has ended, and what its ranks left. plan: what was to happen, in words."""

    def __init__(self, folder: Path, ended: Ended, plan: str = "") -> None:
        self.folder, self.ended, self.plan = folder, ended, plan
        assert ended.is_complete, f"the job did not end:\n{self.told()}"
        self.finals = {path.read_text() for path in folder.glob("final-*")}
        generations = read_logs(folder / "samples")
        self.report: AuditReport = audit(generations)
        self.given_up = steps_given_up(generations)

    @property
    def is_in_memory(self) -> bool:
        """Whether every generation after the first resumed from memory: none began anew after a step was completed."""
        begun = [step for _, generation, _, _, step in self._joined() if generation > 1]
        return not self.ended.lost_copies and all(step > 0 for step in begun)

    def happened(self) -> Iterator[str]:
        """Give the moments and kinds of the faults that did happen."""
        for kind, at in HAPPENED.findall(self.told()):
            yield f"{at} x {kind}"

    def told(self) -> str:
        """All that happened, for a failing test."""
        outputs = sorted(self.folder.glob("output-*"))
        texts = (f"-- {path.name}\n{path.read_text('utf-8', 'replace')}" for path in outputs)
        return "\n".join([self.plan, *self.ended.log, *texts])

    def joined(self, generation: int) -> dict[int, tuple[int, int, int]]:
        """Give, by rank, the pid, the world size and the step with which a generation began."""
        return {rank: (pid, size, step) for pid, number, rank, size, step in self._joined() if number == generation}

    def _joined(self) -> Iterator[tuple[int, int, int, int, int]]:
        for match in JOINED.findall(self.told()):
            pid, generation, rank, size, step = map(int, match)
            yield pid, generation, rank, size, step
