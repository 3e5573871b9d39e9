"""What happens to a job in memory, drawn from a seed, and what its ranks left when it has ended."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.inmemory_slots import Ended, Resize

from elastipod.audit.log_reader import read_logs
from elastipod.audit.report import AuditReport, audit
from elastipod.chaos import FaultKind, Moment, PlannedFault

STEPS = 24
MAX_SIZE = 6
JOINED = re.compile(r"pid (\d+) generation (\d+) rank (\d+) of (\d+) after step (\d+)")
HAPPENED = re.compile(r"chaos: (\w+) at (\w+), rank")
# A fault inside a collective comes from another thread, which can neither raise into the script nor hold it up.
KINDS_AT = [
    (at, kind)
    for at in Moment
    for kind in FaultKind
    if not (at is Moment.COLLECTIVE and kind in (FaultKind.RAISE, FaultKind.HANG, FaultKind.SLOW))
]
BETWEEN_GENERATIONS = (Moment.CONNECTING, Moment.AGREEING, Moment.FILLING, Moment.VERIFYING)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The size that a job begins with, its planned changes, and the faults on the way."""

    size: int
    resizes: tuple[Resize, ...]
    faults: tuple[PlannedFault, ...]


def place_of(seed: int) -> int:
    """Give the place in KINDS_AT of the fault that a seed's schedule is for."""
    return seed % len(KINDS_AT)


def draw(seed: int) -> Schedule:
    """Draw a schedule. Seeds in a row go through all moments and kinds; the rest is left to chance."""
    rng = random.Random(seed)
    sizes = [rng.choices(range(2, MAX_SIZE + 1), weights=(8, 6, 4, 1, 1))[0] for _ in range(3)]
    changes = sorted(rng.sample(range(3, STEPS - 3), rng.randint(0, 2)))
    resizes = [Resize(at, size) for at, size in zip(changes, sizes[1:], strict=False)]
    at, kind = KINDS_AT[place_of(seed)]
    faults = [_fault(rng, at, kind)]
    if at in BETWEEN_GENERATIONS and not resizes:
        faults.append(_fault(rng, Moment.BACKWARD, FaultKind.KILL))  # there is another generation then
    elif rng.random() < 0.3:
        faults.append(_fault(rng, *rng.choice(KINDS_AT)))
    return Schedule(sizes[0], tuple(resizes), tuple(faults))


def _fault(rng: random.Random, at: Moment, kind: FaultKind) -> PlannedFault:
    rank = rng.randrange(2)
    if at in BETWEEN_GENERATIONS:
        return PlannedFault(kind, at, rank, from_generation=2)
    return PlannedFault(kind, at, rank, step=rng.randint(2, STEPS))


class Played:
    """A job that has ended, and what its ranks left. plan: what was to happen, in words."""

    def __init__(self, folder: Path, ended: Ended, plan: str = "") -> None:
        self.folder, self.ended, self.plan = folder, ended, plan
        assert ended.is_complete, f"the job did not end:\n{self.told()}"
        self.finals = {path.read_text() for path in folder.glob("final-*")}
        self.report: AuditReport = audit(read_logs(folder / "samples"))

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
