"""The outcome of a generation, decided from the exits of its workers; and the exit code of the agent."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class StopMode(Enum):
    """Which stop was requested before the workers ended."""

    NONE = "none"
    GRACEFUL = "graceful"
    HARD = "hard"


class Outcome(Enum):
    """The end of one generation in this pod."""

    COMPLETED = "completed"  # every worker exited 0 and none had acknowledged the event
    DRAINED = "drained"  # every worker exited 0 after the event was acknowledged
    CRASHED = "crashed"  # a worker failed
    STOPPED = "stopped"  # the agent ended the workers: a hard stop, or a drain that ran out of time


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """One worker's end. ``status`` is its exit code, or minus the signal's number, as subprocess counts.

    killed: the agent had already begun to end it by force.
    """

    local_rank: int
    status: int
    acknowledged: bool
    killed: bool = False

    @property
    def is_failure(self) -> bool:
        """True if the worker failed: it neither exited with 0 nor was ended by the agent."""
        return self.status != 0 and not self.killed


def classify(exits: Sequence[WorkerExit], stop: StopMode) -> Outcome:
    """Give the outcome of a generation whose workers have all exited.

    One acknowledgement makes it a drain: all ranks agree on the answer, and a script may ask on one rank only and broadcast it.
    Workers can drain without a stop in this pod if the event reached them through another pod.
    """
    if any(one.is_failure for one in exits):
        return Outcome.CRASHED
    if any(one.killed for one in exits) or not exits:
        return Outcome.STOPPED
    if any(one.acknowledged for one in exits):
        return Outcome.DRAINED
    return Outcome.COMPLETED if stop is StopMode.NONE else Outcome.STOPPED


def describe_status(status: int) -> str:
    """Say how a process ended: "exit code 3" or "signal SIGKILL"."""
    if status >= 0:
        return f"exit code {status}"
    return f"signal {signal_name(-status)}"


def signal_name(number: int) -> str:
    """Give a signal's name, "signal 70" where it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def agent_exit_code(last: Outcome | None, *, is_faulted: bool, exit_signal: int | None) -> int:
    """Give the exit code of the agent's own process.

    last: the outcome of the last generation, None before the first one ended or while one runs. exit_signal: the signal that ended the
    agent, None after /shutdown. A pod whose run ended well exits with 0, whatever ended it.
    """
    if is_faulted:
        return 1
    if last in (Outcome.COMPLETED, Outcome.DRAINED):
        return 0
    return 0 if exit_signal is None else 128 + exit_signal


def is_late_drain(stop: StopMode, *, is_past_deadline: bool, has_living: bool) -> bool:
    """Tell whether workers are ended because a drain ran out of time. A hard stop at that time is not a late drain."""
    return stop is StopMode.GRACEFUL and is_past_deadline and has_living


def is_port_taken(global_rank: int | None, stderr_tail: str, master_port: int) -> bool:
    """Tell whether a worker failed because its master port is in use. Only rank 0 listens on it. Such a failure uses up no retry.

    A port that another worker cannot listen on is the script's own, and that failure counts like any other.
    """
    return global_rank == 0 and "EADDRINUSE" in stderr_tail and str(master_port) in stderr_tail
