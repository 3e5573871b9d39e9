"""Faults on purpose, for tests of a training script: kill, stop, raise, hang, slow at a rank, a step and a phase.

`plan_faults` or the variable ``ELASTIPOD_CHAOS`` (the same as JSON) says what happens; a script that uses `elastipod.State`
passes the phases by itself. Each fault happens once for each process, and one with a `once` file once for a whole job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from elastipod.local_worker import store_generation
from elastipod.string_enum import StringEnum

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

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PlannedFault:
        """Read one. Raises ValueError for a kind or moment that does not exist, TypeError for an unknown field."""
        known = {**value, "kind": FaultKind(value["kind"]), "at": Moment(value["at"])}
        return cls(**known)


def plan_faults(faults: Iterable[PlannedFault]) -> None:
    """Let these faults happen in this process, in place of any that were planned before."""
    global _planned
    _planned = list(faults)


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
        text = os.environ.get(CHAOS_ENV)
        _planned = [PlannedFault.from_json(each) for each in json.loads(text)] if text else []
    return _planned


_planned: list[PlannedFault] | None = None
