"""The parts of a pause: what is done between the last step of one world and the first of the next, one part after the other.

A part ends when the last process that takes part in it has done it, so the parts of a pause add up to the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Span:
    """One call of a function, in seconds of the machine's monotonic clock."""

    pid: int
    begin: float
    end: float
    name: str


@dataclass(frozen=True, slots=True)
class Pause:
    """One change of the world: what was noted, and when (monotonic).

    last_step, first_step: last of the old world on any rank, first of the new one on its slowest; after a crash last_step is the
    kill. step_s: what a step usually takes.
    """

    kind: str
    last_step: float
    ready: float
    first_step: float
    step_s: float
    spans: Sequence[Span]

    @property
    def pause_s(self) -> float:
        return self.first_step - self.last_step - self.step_s


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of a part: the last end of a function's call, or its last begin."""

    name: str
    function: str
    is_begin: bool = False


LEAVE = (
    Mark("the ranks agree to stop and copy the state to host memory", "Staging.copy"),
    Mark("the copy is published on every node", "Staging.keep_in_memory"),
)
READY = "the processes that end have ended, and all agents are ready"
BEGIN = (
    Mark("/start; a process that was forked before becomes the worker", "script", is_begin=True),
    Mark("the script imports, and reads its corpus", "State.__init__", is_begin=True),
    Mark("the script builds its state", "State.__init__"),
)
CONNECT = Mark("the ranks connect", "ProcessGroups.connect")
LOAD = (
    Mark("they claim the folder of checkpoints", "Running.claim"),
    Mark("they load what memory holds", "DurableTier.load"),
)
FILL = Mark("new ranks are filled", "MemoryState.fill")
JOIN = (
    Mark("the model is wrapped", "WorldLife._wrap_model"),
    Mark("the sample log is opened, and the digests of all replicas compared", "WorldLife.join"),
)
FIRST = "the first step, beyond a usual one: gradients and digests are compared"
LOAD_ALL = (
    Mark("the script imports, builds and wraps its model, and the ranks connect", "Running.claim", is_begin=True),
    Mark("they claim the folder of checkpoints", "Running.claim"),
    Mark("all ranks load what memory holds", "Resumer.resume"),
    Mark("the sample log is opened", "SampleLog.__init__"),
)
WITHOUT_STATE = (*LEAVE, READY, BEGIN[0], *LOAD_ALL, "the first step, beyond a usual one")
NEW_PROCESSES = (*LEAVE, READY, *BEGIN, CONNECT, *LOAD, FILL, *JOIN, FIRST)
IN_MEMORY = (
    Mark("the ranks agree to stop, and take their groups down", "State._leave"),
    READY,
    CONNECT,
    FILL,
    *JOIN,
    FIRST,
)
CRASH = (READY, *BEGIN, CONNECT, FILL, *JOIN, FIRST)


def parts_of(pause: Pause, marks: Sequence[Mark | str]) -> list[tuple[str, float]]:
    """Give what each part took, in seconds; they add up to the pause."""
    found: list[tuple[str, float]] = []
    before = pause.last_step
    for mark in marks:
        if isinstance(mark, str):
            at = pause.ready if mark == READY else pause.first_step - pause.step_s
            name = mark
        else:
            name, at = mark.name, _last(pause, mark, before)
        found.append((name, at - before))
        before = at
    return found


def _last(pause: Pause, mark: Mark, before: float) -> float:
    """Give the end of a part; where nobody was later than in the part before it, that part's end."""
    calls = [
        span for span in pause.spans if span.name == mark.function and pause.last_step < span.end < pause.first_step
    ]
    times = [span.begin if mark.is_begin else span.end for span in calls]
    return max([before, *times])


def read_spans(folder: Path) -> list[Span]:
    """Read what all processes of a folder have noted."""
    found: list[Span] = []
    for file in folder.glob("*.spans"):
        for line in file.read_text().splitlines():
            begin, end, name = line.split()
            found.append(Span(int(file.stem), float(begin), float(end), name))
    return found
