"""Faults on purpose, for tests of a training script: kill, stop, raise, hang, slow at a rank, a step and a phase.

`plan_faults` or the variable ``ELASTIPOD_CHAOS`` (the same as JSON) says what happens; a script that uses `elastipod.State`
passes the phases by itself. Each fault happens once for each process, and one with a `once` file once for a whole job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeVar

from elastipod.json_values import JsonError, described, parse_json
from elastipod.local_worker import store_generation
from elastipod.string_enum import StringEnum
from elastipod.value_words import kind_of

WordT = TypeVar("WordT", bound=StringEnum)
EXPECTED = 'the value is a list of objects, such as [{"kind": "kill", "at": "backward", "rank": 1, "step": 40}]'
CHAOS_ENV = "ELASTIPOD_CHAOS"
FOLLOWER = -1  # the rank of a newcomer that follows: it has none yet


class FaultKind(StringEnum):
    """What happens to the process."""

    KILL = "kill"
    STOP = "stop"
    RAISE = "raise"
    HANG = "hang"
    SLOW = "slow"


class Moment(StringEnum):
    """Where in a step, or between two generations, it happens."""

    STEP = "step"
    """At the beginning of the step."""
    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    """Gradients are being reduced: the thread that trains has begun the first such collective after the step's first gradient, and does
    not wait for it yet. It is that of DDP's first bucket, of FSDP2's first shards, or the script's own; the backend goes on with it
    meanwhile, so the other ranks may see it succeed. A step that reduces nothing, as in a single process, does not pass it."""
    BEFORE_APPLY = "before_apply"
    """The gradients are reduced and clipped, the optimizer has not run."""
    APPLY = "apply"
    """The optimizer has run, the schedule and the averages have not."""
    COPY = "copy"
    """Copies of the step's shards travel: this rank has sent or received one of its messages. For sharded state with `Copies`."""
    HAND_OVER = "hand_over"
    """In a planned change, shards of those who leave travel to those who stay: this rank has sent or received one of its messages. For
    sharded state."""
    FOLLOWING = "following"
    """A newcomer follows those who train. On a rank that is followed: a step is there that it is about to send to its followers. On a
    newcomer, in the thread that follows: it has repeated the step, and takes over more of the state. For replicated state; "raise" ends
    the following, and not the process."""
    CONNECTING = "connecting"
    AGREEING = "agreeing"
    FILLING = "filling"
    VERIFYING = "verifying"


class ChaosError(Exception):
    """The exception of the kind "raise"; to a job it is an error of the user's script."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault. step: the step in work, or at a moment between generations, the one that would be next; None: any.

    rank: global, of a newcomer that follows `FOLLOWER`, None: any. from_generation: the first one in which it may happen. seconds: of
    "slow". once: a file that is made, with the number of the process, when the fault happens; while it exists, it does not.
    """

    kind: FaultKind
    at: Moment
    rank: int | None = None
    step: int | None = None
    from_generation: int = 0
    seconds: float = 0.05
    once: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", _word(FaultKind, "kind", self.kind))
        object.__setattr__(self, "at", _word(Moment, "at", self.at))
        for name in ("rank", "step", "from_generation"):
            value = getattr(self, name)
            is_open = value is None and name != "from_generation"
            if not is_open and (not isinstance(value, Integral) or isinstance(value, bool)):
                raise TypeError(f"{name} is {value!r:.80}; it must be a whole number")
        if not isinstance(self.seconds, Real) or self.seconds < 0:
            raise TypeError(f"seconds is {self.seconds!r:.80}; it must be a number, at least 0")
        if not isinstance(self.once, (str, os.PathLike)):
            raise TypeError(f"once is {self.once!r:.80}; it must be the path of a file")

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PlannedFault:
        """Read one. Raises ValueError for a kind or moment that does not exist, TypeError for an unknown field or a wrong type."""
        if not isinstance(value, dict):
            raise TypeError(f"{described(value)} is no fault; {EXPECTED}")
        names = [each.name for each in fields(cls)]
        if unknown := [name for name in value if name not in names]:
            raise TypeError(f"there is no field {', '.join(unknown)}; a fault has {', '.join(names)}")
        words: tuple[tuple[str, type[StringEnum]], ...] = (("kind", FaultKind), ("at", Moment))
        for name, kind in words:
            if name not in value:
                raise ValueError(f"{name} is missing; it must be one of {', '.join(kind)}")
        return cls(**value)

    def __str__(self) -> str:
        rank = "any rank" if self.rank is None else f"rank {self.rank}"
        step = "any step" if self.step is None else f"step {self.step}"
        later = f", from generation {self.from_generation}" if self.from_generation > 1 else ""
        return f"{self.kind} at {self.at}, {rank}, {step}{later}"


def plan_faults(faults: Iterable[PlannedFault]) -> None:
    """Let these faults happen in this process, in place of any that were planned before. Raises TypeError, ValueError."""
    global _planned
    planned = list(faults)
    for number, fault in enumerate(planned):
        with _named(f"fault {number}"):
            if not isinstance(fault, PlannedFault):
                raise TypeError(f"it is {kind_of(fault)}; PlannedFault.from_json gives a fault")
            _check_folder(fault)
    _planned = planned


def planned_faults() -> tuple[PlannedFault, ...]:
    """Give the faults that are still to come. Raises ValueError or TypeError where the variable does not say them."""
    return tuple(_faults())


def is_planned(at: Moment, *, rank: int | None = None, step: int | None = None) -> bool:
    """Whether a fault at this moment is still to come, so that a caller can do without hooks otherwise. rank, step: None for any."""
    return any(
        fault.at is at and (rank is None or fault.rank in (None, rank)) and (step is None or fault.step in (None, step))
        for fault in _faults()
    )


def reached(at: Moment, *, rank: int, step: int) -> None:
    """Pass a moment: what is planned for it happens now. Raises ChaosError for the kind "raise"."""
    for fault in _faults():
        is_here = fault.at is at and fault.rank in (None, rank) and fault.step in (None, step)
        if is_here and store_generation() >= fault.from_generation and _is_first(fault):
            _faults().remove(fault)
            _happen(fault, rank, step)
            return


def passing(at: Moment, progress: Callable[[], None], *, rank: int, step: int) -> Callable[[], None]:
    """Give ``progress``, which a transfer calls after each message, so that each call passes a moment as well, if a fault is planned."""
    if not is_planned(at, rank=rank, step=step):
        return progress

    def progressed() -> None:
        progress()
        reached(at, rank=rank, step=step)

    return progressed


def _happen(fault: PlannedFault, rank: int, step: int) -> None:
    print(f"chaos: {fault.kind} at {fault.at}, rank {rank}, step {step}", file=sys.stderr, flush=True)
    if fault.kind is FaultKind.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind is FaultKind.STOP:
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.kind is FaultKind.RAISE:
        raise ChaosError(f"raised on purpose at {fault.at} of step {step} on rank {rank}")
    while fault.kind is FaultKind.HANG:
        time.sleep(3600)
    if fault.kind is FaultKind.SLOW:
        time.sleep(fault.seconds)


def _is_first(fault: PlannedFault) -> bool:
    if not fault.once:
        return True
    try:
        descriptor = os.open(fault.once, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return False
    os.write(descriptor, str(os.getpid()).encode())
    os.close(descriptor)
    return True


def _faults() -> list[PlannedFault]:
    global _planned
    if _planned is None:
        _planned = _read(os.environ.get(CHAOS_ENV, ""))
    return _planned


def _read(text: str) -> list[PlannedFault]:
    if not text.strip():
        return []
    try:
        values = parse_json(text)
    except JsonError as error:
        raise ValueError(f"{CHAOS_ENV} {error.problem}") from error
    if not isinstance(values, list):
        raise ValueError(f"{CHAOS_ENV} is {described(values)}; {EXPECTED}")
    found = []
    for number, value in enumerate(values):
        with _named(f"{CHAOS_ENV}, fault {number}"):
            found.append(PlannedFault.from_json(value))
            _check_folder(found[-1])
    return found


@contextmanager
def _named(where: str) -> Iterator[None]:
    """Put what an error is about before its text."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def _word(kind: type[WordT], name: str, value: object) -> WordT:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r:.80}; it must be one of {', '.join(kind)}") from None


def _check_folder(fault: PlannedFault) -> None:
    folder = os.path.dirname(os.fspath(fault.once))
    if folder and not os.path.isdir(folder):
        raise ValueError(f"once is {fault.once}, and the folder {folder} does not exist")


_planned: list[PlannedFault] | None = None
