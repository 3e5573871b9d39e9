"""In-process restart: where the ranks of this pod are, and what follows from it.

The worker processes live over generations. Between two runs they are gathered at a barrier; a run begins when they are
released from it and ends when they have left, come back, or failed. Both questions are answered here from facts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from elastipod.ipc.protocol import RestartMode

MAX_ATTEMPTS = 3  # processes in a row that ended, or were late, before they came to the barrier
_MODE_ALIASES = {  # what operators say for it, beside the names of RestartMode
    "": RestartMode.IN_PROCESS_RESTART,
    "ipr": RestartMode.IN_PROCESS_RESTART,
    "in_process": RestartMode.IN_PROCESS_RESTART,
    "plr": RestartMode.PROCESS_LEVEL_RESTART,
    "jlr": RestartMode.JOB_LEVEL_RESTART,
}


class RankPosition(Enum):
    """Where one rank is."""

    NO_PROCESS = "gone"  # it has no process
    STARTING = "starting"  # a new process that has not been at the barrier
    AWAITING_RANK = "awaiting rank"  # asks for its rank, which it wants before it goes to the barrier
    AT_BARRIER = "at barrier"
    RELEASED = "released"  # has taken the start
    PAST_BARRIER = "past barrier"  # has entered the code that a restart runs again

    @property
    def is_waiting(self) -> bool:
        """True when a start is all that the rank needs."""
        return self in (RankPosition.AT_BARRIER, RankPosition.AWAITING_RANK)


def parse_restart_mode(text: str) -> RestartMode:
    """Read the `restart_mode` of a /stop. What we do not know is taken for new processes, which help always."""
    word = text.strip().lower()
    if word in _MODE_ALIASES:
        return _MODE_ALIASES[word]
    try:
        return RestartMode(word)
    except ValueError:
        return RestartMode.PROCESS_LEVEL_RESTART


def ranks_to_replace(mode: RestartMode, num_ranks: int, requested: frozenset[int]) -> frozenset[int]:
    """Give the local ranks that get new processes though their own may still live.

    requested: those that asked for a process of their own to be started anew. With any but the two modes that keep
    processes, all do: job-level restarts replace the pods, and until then it is as if the processes were replaced.
    """
    if mode in (RestartMode.IN_PROCESS_RESTART, RestartMode.LOCAL_PRL):
        return requested
    return frozenset(range(num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheringRank:
    """One local rank while the ranks are being gathered.

    num_failures: its processes in a row that ended or were late before they came to the barrier. to_be_replaced: its
    process is to be replaced. gone_at: when its process ended, monotonic.
    """

    position: RankPosition
    num_failures: int = 0
    to_be_replaced: bool = False
    gone_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """What gathering needs now. kill, spawn: local ranks. late: those of the killed that held up the others.

    is_done: nothing more is to be done; is_given_up: because some rank's processes fail again and again. wake_at: when to
    look again though nothing happened, monotonic.
    """

    kill: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    spawn: frozenset[int] = frozenset()
    is_done: bool = False
    is_given_up: bool = False
    wake_at: float | None = None


def plan_gathering(ranks: Sequence[GatheringRank], *, now: float, deadline: float) -> GatherPlan:
    """Say how to bring all ranks to the barrier. deadline: when those that are not there are taken for stuck.

    A rank that is late shows that something no longer works, so all processes of the pod are started anew then.
    """
    unwanted = frozenset(
        index
        for index, rank in enumerate(ranks)
        if rank.to_be_replaced and rank.position is not RankPosition.NO_PROCESS
    )
    if unwanted:
        return GatherPlan(kill=unwanted)
    gone = {index: rank for index, rank in enumerate(ranks) if rank.position is RankPosition.NO_PROCESS}
    away = frozenset(
        index
        for index, rank in enumerate(ranks)
        if not rank.position.is_waiting and rank.position is not RankPosition.NO_PROCESS
    )
    if any(rank.num_failures >= MAX_ATTEMPTS for rank in gone.values()):
        return GatherPlan(is_done=True, is_given_up=True)
    if away and now >= deadline:
        return GatherPlan(kill=frozenset(range(len(ranks))) - gone.keys(), late=away)
    due = {index: rank.gone_at + retry_delay_s(rank.num_failures) for index, rank in gone.items()}
    spawn = frozenset(index for index, at in due.items() if at <= now)
    if spawn:
        return GatherPlan(spawn=spawn)
    if not gone and not away:
        return GatherPlan(is_done=True)
    return GatherPlan(wake_at=min([*due.values(), *([deadline] if away else [])]))


def retry_delay_s(num_failures: int) -> float:
    """Give how long a rank waits for its next process: none after the first failure, which may have been chance."""
    return 0.0 if num_failures <= 1 else 2.0 ** (num_failures - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInRun:
    """One local rank during a run. status: its process's end (0, or not: see WorkerExit), None while it lives.

    is_failure: the process ended by itself and badly. has_joined: it took this run's start. acknowledged: it has seen the
    elastic event.
    """

    position: RankPosition
    status: int | None = None
    is_failure: bool = False
    has_joined: bool = True
    acknowledged: bool = False

    @property
    def has_returned(self) -> bool:
        """True when it took part in this run and is at the barrier again."""
        return self.has_joined and self.position is RankPosition.AT_BARRIER


class RunState(Enum):
    """How a run stands."""

    RUNNING = "goes on"
    CRASHED = "crashed"
    START_MISSED = "never came"  # a rank was released and did not take the start
    ENDED = "left"  # all processes ended well, or are back at the barrier after an elastic event


def run_state(ranks: Sequence[RankInRun], *, is_draining: bool, now: float, join_by: float) -> RunState:
    """Tell how a run stands. join_by: until when every rank should have taken the start.

    Ranks that are back without a reason wait: another pod's rank may have failed, and its operator's /stop is on the way.
    """
    if any(rank.is_failure for rank in ranks):
        return RunState.CRASHED
    has_event = is_draining or any(rank.acknowledged for rank in ranks)
    if all(rank.status is not None or (has_event and rank.has_returned) for rank in ranks):
        return RunState.ENDED
    if now >= join_by and any(rank.status is None and not rank.has_joined for rank in ranks):
        return RunState.START_MISSED
    return RunState.RUNNING
