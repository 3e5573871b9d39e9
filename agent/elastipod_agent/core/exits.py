"""How a generation ended: completed, drained, crashed or stopped, from its workers' exits; and the agent's exit code."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class StopMode(Enum):
    """What was asked of the workers before they ended."""

    NONE = "none"
    GRACEFUL = "graceful"
    HARD = "hard"


class Outcome(Enum):
    """The end of one generation in this pod."""

    COMPLETED = "completed"  # every worker exited 0 and none had acknowledged the event
    DRAINED = "drained"  # every worker exited 0 after the event was acknowledged
    CRASHED = "crashed"  # a worker failed by itself
    STOPPED = "stopped"  # ended by us, as asked, or out of time


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """One worker's end. ``status`` is its exit code, or minus the signal's number, as subprocess counts.

    killed: this agent had already begun to end it by force when it went.
    """

    local_rank: int
    status: int
    acknowledged: bool
    killed: bool = False

    @property
    def is_failure(self) -> bool:
        """True when the worker failed by itself: neither exit 0 nor an end that the agent brought about."""
        return self.status != 0 and not self.killed


def classify(exits: Sequence[WorkerExit], stop: StopMode) -> Outcome:
    """Name the end of a generation whose workers have all exited.

    One acknowledgement makes it a drain: the answer is agreed among all ranks, and a script may ask on one rank only
    and tell the others itself. A worker may drain without any stop here, when the event came through another pod.
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

    last: the last generation's end, None before the first or while one ran. exit_signal: the signal that ended the
    agent, None after /shutdown. A pod whose run ended well ends well, whoever ended it.
    """
    if is_faulted:
        return 1
    if last in (Outcome.COMPLETED, Outcome.DRAINED):
        return 0
    return 0 if exit_signal is None else 128 + exit_signal


def is_late_drain(stop: StopMode, *, is_past_deadline: bool, has_living: bool) -> bool:
    """Tell whether workers are ended because a drain's time ran out; a hard stop may come then as well, and is no late drain."""
    return stop is StopMode.GRACEFUL and is_past_deadline and has_living


def is_port_taken(global_rank: int | None, stderr_tail: str, master_port: int) -> bool:
    """Tell whether a worker failed because its master port is in use: only rank 0 listens there, so that it costs no retry.

    What any other worker cannot listen on is a port of the script's own, and its failure counts like every other.
    """
    return global_rank == 0 and "EADDRINUSE" in stderr_tail and str(master_port) in stderr_tail
