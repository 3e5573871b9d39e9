"""What the training processes wrote down (see train.py), and the times that a benchmark draws from it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Step:
    """One completed step: when, in seconds of the machine's monotonic clock, and its number in the job."""

    at: float
    number: int


@dataclass(slots=True)
class Worker:
    """One training process in one world. name: of its log, `<pid>` or, for a process that outlives worlds, `<pid>-<generation>`.

    is_warm: torch was loaded before this world began. Times are monotonic; 0 = not yet.
    """

    name: str
    began: float = 0.0
    imported: float = 0.0
    grouped: float = 0.0
    is_warm: bool = False
    rank: int = -1
    world_size: int = 0
    steps: list[Step] = field(default_factory=list)

    @property
    def pid(self) -> int:
        return pid_of(self.name)


@dataclass(frozen=True, slots=True)
class Restart:
    """From one world to the next.

    last_old and first_new: last completed step of the old world on any rank, first one of the new world on its slowest
    rank. repeated: steps of the old world that the new one made again.
    """

    last_old: float
    first_new: float
    repeated: int

    @property
    def gap_s(self) -> float:
        return self.first_new - self.last_old


def pid_of(name: str) -> int:
    """Give the process that a log of this name is of."""
    return int(name.partition("-")[0])


def read(folder: Path, but: Collection[str] = ()) -> list[Worker]:
    """Read all logs of a folder, but those of some names; a line that is still being written is left for the next time."""
    names = sorted(path.stem for path in folder.glob("*.log") if re.fullmatch(r"\d+(-\d+)?", path.stem))
    return [read_one(folder, name) for name in names if name not in but]


def read_one(folder: Path, name: str) -> Worker:
    """Read one log. Raises OSError when there is none of this name."""
    return _parse(name, (folder / f"{name}.log").read_text())


def complete_world(workers: Iterable[Worker], size: int, since: float) -> list[Worker] | None:
    """Give the workers of the first world of this size, by rank, that began after a moment and whose every rank has made a step.

    since: monotonic. A rank's latest process counts, should an earlier one have failed in its start.
    """
    newest: dict[int, Worker] = {}
    for worker in sorted(workers, key=lambda one: one.began):
        if worker.world_size == size and worker.began > since and worker.steps:
            newest[worker.rank] = worker
    return [newest[rank] for rank in range(size)] if len(newest) == size else None


def restart(old: Sequence[Worker], new: Sequence[Worker]) -> Restart:
    """Measure the change from one world to another; all of them must have made a step."""
    last = max((worker.steps[-1] for worker in old), key=lambda step: step.at)
    made = max(worker.steps[-1].number for worker in old)
    return Restart(last.at, first_step_everywhere(new), max(0, made + 1 - min(w.steps[0].number for w in new)))


def first_step_everywhere(workers: Sequence[Worker]) -> float:
    """Give the moment at which the slowest rank had completed its first step."""
    return max(worker.steps[0].at for worker in workers)


def usual_step(world: Iterable[Worker], since: float = 0.0, until: float = float("inf")) -> float:
    """Give the median time of a step between two moments; the first of a world counts not, it has more to do."""
    found: list[float] = []
    for worker in world:
        steps = worker.steps[1:]
        found += [after.at - before.at for before, after in pairwise(steps) if before.at >= since and after.at <= until]
    return median(found) if found else float("nan")


def _parse(name: str, text: str) -> Worker:
    worker = Worker(name)
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        word, at, *rest = line.split()
        if word == "begin":
            worker.began, worker.is_warm = float(at), rest == ["1"]
        elif word == "imported":
            worker.imported = float(at)
        elif word == "grouped":
            worker.grouped, worker.rank, worker.world_size = float(at), int(rest[0]), int(rest[1])
        elif word == "step":
            worker.steps.append(Step(float(at), int(rest[0])))
        else:
            raise ValueError(f"a step log has a line that nobody knows: {line!r}")
    return worker
