"""Faults on purpose, for tests of a training script: kill, stop, raise, hang, slow at a rank, a step and a phase.

`plan_faults` or the variable ``ELASTIPOD_CHAOS`` (the same as JSON) says what happens; a script that uses `elastipod.State`
passes the phases by itself. Each fault happens once for each process, and one with a `once` file once for a whole job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elastipod.local_worker import store_generation
from elastipod.string_enum import StringEnum

CHAOS_ENV = "ELASTIPOD_CHAOS"
COLLECTIVE_DELAY_S = 0.002  # from a gradient to the fault "inside the collective", which has begun by then


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
    """While gradients are reduced: a little after the first of them is there, from another thread. For "kill" and "stop" only."""
    BEFORE_APPLY = "before_apply"
    """The gradients are reduced and clipped, the optimizer has not run."""
    APPLY = "apply"
    """The optimizer has run, the schedule and the averages have not."""
    CONNECTING = "connecting"
    AGREEING = "agreeing"
    FILLING = "filling"
    VERIFYING = "verifying"


class ChaosError(Exception):
    """The exception of the kind "raise"; to a job it is an error of the user's script."""


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """One fault. step: the step in work, or after a moment between generations, the one that would be next; None: any.

    rank: global, None: any. from_generation: the first one in which it may happen. seconds: of "slow". once: a file that is made,
    with the number of the process, when the fault happens; while it exists, it does not. Raises ValueError for "raise", "hang" and
    "slow" at "collective": another thread than the training's can only end or stop the process.
    """

    kind: FaultKind
    at: Moment
    rank: int | None = None
    step: int | None = None
    from_generation: int = 0
    seconds: float = 0.05
    once: str = ""

    def __post_init__(self) -> None:
        if self.at is Moment.COLLECTIVE and self.kind not in (FaultKind.KILL, FaultKind.STOP):
            raise ValueError(
                f"kind is {self.kind}, which does nothing at collective: there a fault comes from another thread than the training's; "
                "choose kill or stop, or another moment, such as backward"
            )

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PlannedFault:
        """Read one. Raises ValueError for a kind or moment that does not exist, or not together, TypeError for an unknown field."""
        known = {**value, "kind": FaultKind(value["kind"]), "at": Moment(value["at"])}
        return cls(**known)


def plan_faults(faults: Iterable[PlannedFault]) -> None:
    """Let these faults happen in this process, in place of any that were planned before."""
    global _planned
    _planned = list(faults)


def is_planned(at: Moment) -> bool:
    """Whether a fault at this moment is still to come, so that a caller can do without hooks otherwise."""
    return any(fault.at is at for fault in _faults())


def reached(at: Moment, *, rank: int, step: int) -> None:
    """Pass a moment: what is planned for it happens now. Raises ChaosError for the kind "raise"."""
    for fault in _faults():
        is_here = fault.at is at and fault.rank in (None, rank) and fault.step in (None, step)
        if is_here and store_generation() >= fault.from_generation and _is_first(fault):
            _faults().remove(fault)
            if at is Moment.COLLECTIVE:
                threading.Timer(COLLECTIVE_DELAY_S, _happen, (fault, rank, step)).start()
            else:
                _happen(fault, rank, step)
            return


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
