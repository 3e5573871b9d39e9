"""In-process restart: how to gather the ranks of a pod at the barrier, and when a run has ended.

The worker processes live over generations. Between two runs they wait at a barrier. A run begins when they are released from it and
ends when they have exited, returned, or failed. Both decisions are made here from facts alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from elastipod.ipc.protocol import RestartMode
from elastipod_agent.core.exits import Outcome

MAX_ATTEMPTS = 3  # processes in a row that ended or were late before they reached the barrier
_MODE_ALIASES = {  # names that operators use besides the values of RestartMode
    "": RestartMode.IN_PROCESS_RESTART,
    "ipr": RestartMode.IN_PROCESS_RESTART,
    "in_process": RestartMode.IN_PROCESS_RESTART,
    "plr": RestartMode.PROCESS_LEVEL_RESTART,
    "jlr": RestartMode.JOB_LEVEL_RESTART,
}


class StateKind(Enum):
    """How the workers of a pod hold the training state that outlives a generation in their memory."""

    REPLICATED = "replicated"  # every rank has all of it
    SHARDED = "sharded"  # a rank has a part of it


class RankPosition(Enum):
    """Where the process of one rank is."""

    NO_PROCESS = "gone"  # there is no process
    STARTING = "starting"  # a new process that has not reached the barrier
    AWAITING_RANK = "awaiting rank"  # waits for its rank before it goes to the barrier
    AT_BARRIER = "at barrier"
    RELEASED = "released"  # has received the start
    PAST_BARRIER = "past barrier"  # runs the code that a restart repeats

    @property
    def is_waiting(self) -> bool:
        """True if the rank needs nothing but a start."""
        return self in (RankPosition.AT_BARRIER, RankPosition.AWAITING_RANK)


class WorkerPreparation(Enum):
    """How far the workers have come that were started ahead of their first generation."""

    BEGUN = "begun"
    READY = "ready"  # all of them wait at the barrier
    FAILED = "failed"  # they have ended; the next start starts others


def preparation_now(before: WorkerPreparation, *, is_gathered: bool, has_all_processes: bool) -> WorkerPreparation:
    """Give how far the workers are. One that waits is not at the barrier for a moment when it asks again."""
    if is_gathered or (before is WorkerPreparation.READY and has_all_processes):
        return WorkerPreparation.READY
    return WorkerPreparation.BEGUN


def parse_restart_mode(text: str) -> RestartMode:
    """Parse the `restart_mode` of a /stop. An unknown mode means new processes, which always work."""
    word = text.strip().lower()
    if word in _MODE_ALIASES:
        return _MODE_ALIASES[word]
    try:
        return RestartMode(word)
    except ValueError:
        return RestartMode.PROCESS_LEVEL_RESTART


def keeps_processes(restart_mode: str, *, is_graceful: bool) -> bool:
    """Tell whether a /stop leaves their processes to workers that were started for one generation and can live through several.

    An operator that knows nothing of such workers names no mode. After a hard stop it expects new processes; after a drain it cannot
    tell whether there are any.
    """
    if not restart_mode.strip():
        return is_graceful
    return parse_restart_mode(restart_mode) in (RestartMode.IN_PROCESS_RESTART, RestartMode.LOCAL_PRL)


def is_followed_by_new_processes(outcome: Outcome, restart_mode: str, *, leaves: bool | None) -> bool:
    """Tell whether the next generation of this pod begins with new processes, after workers that could have been kept.

    Only of a drain is this certain, and only where the operator has said that the pod stays, and that the processes do not.
    """
    is_told = bool(restart_mode.strip()) and parse_restart_mode(restart_mode) is RestartMode.PROCESS_LEVEL_RESTART
    return outcome is Outcome.DRAINED and leaves is False and is_told


def kept_after_drain(restart_mode: str) -> bool | None:
    """Tell workers whether their processes live on after a drain; None if the operator does not say."""
    return keeps_processes(restart_mode, is_graceful=True) if restart_mode.strip() else None


def pod_state(announced: Sequence[StateKind | None]) -> StateKind | None:
    """Give the kind of state that a pod's workers keep together; None unless each of them has announced one."""
    if not announced or None in announced:
        return None
    return StateKind.SHARDED if StateKind.SHARDED in announced else StateKind.REPLICATED


_DEPTHS = (
    RestartMode.IN_PROCESS_RESTART,
    RestartMode.LOCAL_PRL,
    RestartMode.PROCESS_LEVEL_RESTART,
    RestartMode.JOB_LEVEL_RESTART,
)


def is_deeper(mode: RestartMode | None, other: RestartMode | None) -> bool:
    """Tell whether a worker asks for more than another one. None asks for nothing in particular."""
    return mode is not None and _DEPTHS.index(mode) > _DEPTHS.index(other or RestartMode.IN_PROCESS_RESTART)


def ranks_to_replace(mode: RestartMode, num_ranks: int, requested: frozenset[int]) -> frozenset[int]:
    """Give the local ranks that get a new process even if theirs is alive.

    requested: ranks that asked for a new process. Any mode but the two that keep processes replaces all of them: a job-level restart
    replaces the pods, and until then it works like a replacement of the processes.
    """
    if mode in (RestartMode.IN_PROCESS_RESTART, RestartMode.LOCAL_PRL):
        return requested
    return frozenset(range(num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheringRank:
    """One local rank while the ranks are being gathered.

    deadline: from when on a rank that is not at the barrier counts as stuck, monotonic. num_failures: its processes in a row that ended
    or were late before they reached the barrier. gone_at: when its process ended, monotonic.
    """

    position: RankPosition
    num_failures: int = 0
    to_be_replaced: bool = False
    gone_at: float = 0.0
    deadline: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """What gathering needs now. kill, spawn: local ranks. late: those of ``kill`` that held up the others.

    is_done: there is nothing left to do; is_given_up: because the processes of a rank keep failing. wake_at: when to plan again if
    nothing happens, monotonic.
    """

    kill: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    spawn: frozenset[int] = frozenset()
    is_done: bool = False
    is_given_up: bool = False
    wake_at: float | None = None


def plan_gathering(ranks: Sequence[GatheringRank], *, now: float) -> GatherPlan:
    """Plan how to bring all ranks to the barrier.

    A late rank shows that something is broken, so all processes of the pod are restarted then.
    """
    unwanted = frozenset(
        index
        for index, rank in enumerate(ranks)
        if rank.to_be_replaced and rank.position is not RankPosition.NO_PROCESS
    )
    if unwanted:
        return GatherPlan(kill=unwanted)
    gone = {index: rank for index, rank in enumerate(ranks) if rank.position is RankPosition.NO_PROCESS}
    away = {
        index: rank.deadline
        for index, rank in enumerate(ranks)
        if not rank.position.is_waiting and rank.position is not RankPosition.NO_PROCESS
    }
    if any(rank.num_failures >= MAX_ATTEMPTS for rank in gone.values()):
        return GatherPlan(is_done=True, is_given_up=True)
    late = frozenset(index for index, deadline in away.items() if now >= deadline)
    if late:
        return GatherPlan(kill=frozenset(range(len(ranks))) - gone.keys(), late=late)
    due = {index: rank.gone_at + retry_delay_s(rank.num_failures) for index, rank in gone.items()}
    spawn = frozenset(index for index, at in due.items() if at <= now)
    if spawn:
        return GatherPlan(spawn=spawn)
    if not gone and not away:
        return GatherPlan(is_done=True)
    return GatherPlan(wake_at=min([*due.values(), *away.values()]))


def retry_delay_s(num_failures: int) -> float:
    """Give the seconds until a rank gets its next process: 0 after the first failure, then doubling."""
    return 0.0 if num_failures <= 1 else 2.0 ** (num_failures - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInRun:
    """One local rank during a run. status: how its process ended (see WorkerExit), None while it is alive.

    is_failure: the process failed. has_joined: the rank has received the start of this run. acknowledged: it has seen the elastic
    event.
    """

    position: RankPosition
    status: int | None = None
    is_failure: bool = False
    has_joined: bool = True
    acknowledged: bool = False

    @property
    def has_returned(self) -> bool:
        """True if the rank took part in this run and is back at the barrier."""
        return self.has_joined and self.position is RankPosition.AT_BARRIER


class RunState(Enum):
    """The state of a run."""

    RUNNING = "goes on"
    CRASHED = "crashed"
    START_MISSED = "never came"  # a rank was released and did not receive the start
    ENDED = "left"  # all processes exited with 0, or are back at the barrier after an elastic event


def run_state(ranks: Sequence[RankInRun], *, is_draining: bool, now: float, join_by: float) -> RunState:
    """Give the state of a run. join_by: when every rank should have received the start.

    Ranks that are back without an event wait: a rank of another pod may have failed, and the operator's /stop will follow.
    """
    if any(rank.is_failure for rank in ranks):
        return RunState.CRASHED
    has_event = is_draining or any(rank.acknowledged for rank in ranks)
    if all(rank.status is not None or (has_event and rank.has_returned) for rank in ranks):
        return RunState.ENDED
    if now >= join_by and any(rank.status is None and not rank.has_joined for rank in ranks):
        return RunState.START_MISSED
    return RunState.RUNNING
