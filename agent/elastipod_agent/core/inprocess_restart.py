"""In-process restart: where the ranks of this pod are, and what follows from it.

The worker processes live over generations. Between two runs they are gathered at a barrier; a run begins when they are
released from it and ends when they have left, come back, or failed. Both questions are answered here from facts alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from elastipod.ipc_wire import RestartMode

MAX_ATTEMPTS = 3  # processes in a row that ended, or were late, before they came to the barrier
_SPOKEN = {  # what operators say for it, beside the names of RestartMode
    "": RestartMode.IN_PROCESS_RESTART,
    "ipr": RestartMode.IN_PROCESS_RESTART,
    "in_process": RestartMode.IN_PROCESS_RESTART,
    "plr": RestartMode.PROCESS_LEVEL_RESTART,
    "jlr": RestartMode.JOB_LEVEL_RESTART,
}


class Place(Enum):
    """Where one rank is."""

    GONE = "gone"  # it has no process
    STARTING = "starting"  # a new process that has not been at the barrier
    AWAITING_RANK = "awaiting rank"  # asks for its rank, which it wants before it goes to the barrier
    AT_BARRIER = "at barrier"
    RELEASED = "released"  # has taken the start
    PAST_BARRIER = "past barrier"  # has entered the code that a restart runs again

    @property
    def is_waiting(self) -> bool:
        """True when a start is all that the rank needs."""
        return self in (Place.AT_BARRIER, Place.AWAITING_RANK)


def spoken_mode(text: str) -> RestartMode:
    """Read the `restart_mode` of a /stop. What we do not know is taken for new processes, which help always."""
    word = text.strip().lower()
    if word in _SPOKEN:
        return _SPOKEN[word]
    try:
        return RestartMode(word)
    except ValueError:
        return RestartMode.PROCESS_LEVEL_RESTART


def to_replace(mode: RestartMode, num_ranks: int, given_up: frozenset[int]) -> frozenset[int]:
    """Give the local ranks that get new processes though their own may still live.

    given_up: those that asked for a process of their own to be started anew. With any but the two modes that keep
    processes, all do: job-level restarts replace the pods, and until then it is as if the processes were replaced.
    """
    if mode in (RestartMode.IN_PROCESS_RESTART, RestartMode.LOCAL_PRL):
        return given_up
    return frozenset(range(num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One local rank while the ranks are being gathered.

    num_failures: its processes in a row that ended or were late before they came to the barrier. is_unwanted: its
    process is to be replaced. gone_at: when its process ended, monotonic.
    """

    place: Place
    num_failures: int = 0
    is_unwanted: bool = False
    gone_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What gathering needs now. kill, spawn: local ranks. late: those of the killed that held up the others.

    is_over: nothing more is to be done; is_hopeless: because some rank's processes fail again and again. wake_at: when to
    look again though nothing happened, monotonic.
    """

    kill: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    spawn: frozenset[int] = frozenset()
    is_over: bool = False
    is_hopeless: bool = False
    wake_at: float | None = None


def gather(ranks: Sequence[Rank], *, now: float, deadline: float) -> Orders:
    """Say how to bring all ranks to the barrier. deadline: when those that are not there are taken for stuck.

    A rank that is late shows that something no longer works, so all processes of the pod are started anew then.
    """
    unwanted = frozenset(index for index, rank in enumerate(ranks) if rank.is_unwanted and rank.place is not Place.GONE)
    if unwanted:
        return Orders(kill=unwanted)
    gone = {index: rank for index, rank in enumerate(ranks) if rank.place is Place.GONE}
    away = frozenset(
        index for index, rank in enumerate(ranks) if not rank.place.is_waiting and rank.place is not Place.GONE
    )
    if any(rank.num_failures >= MAX_ATTEMPTS for rank in gone.values()):
        return Orders(is_over=True, is_hopeless=True)
    if away and now >= deadline:
        return Orders(kill=frozenset(range(len(ranks))) - gone.keys(), late=away)
    due = {index: rank.gone_at + retry_delay_s(rank.num_failures) for index, rank in gone.items()}
    spawn = frozenset(index for index, at in due.items() if at <= now)
    if spawn:
        return Orders(spawn=spawn)
    if not gone and not away:
        return Orders(is_over=True)
    return Orders(wake_at=min([*due.values(), *([deadline] if away else [])]))


def retry_delay_s(num_failures: int) -> float:
    """Give how long a rank waits for its next process: none after the first failure, which may have been chance."""
    return 0.0 if num_failures <= 1 else 2.0 ** (num_failures - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRank:
    """One local rank during a run. status: its process's end (0, or not: see WorkerExit), None while it lives.

    is_failure: the process ended by itself and badly. has_come: it took this run's start. acknowledged: it has seen the
    elastic event.
    """

    place: Place
    status: int | None = None
    is_failure: bool = False
    has_come: bool = True
    acknowledged: bool = False

    @property
    def is_back(self) -> bool:
        """True when it took part in this run and is at the barrier again."""
        return self.has_come and self.place is Place.AT_BARRIER


class Verdict(Enum):
    """How a run stands."""

    GOES_ON = "goes on"
    CRASHED = "crashed"
    NEVER_CAME = "never came"  # a rank was released and did not take the start
    LEFT = "left"  # all processes ended well, or are back at the barrier after an elastic event


def judge(ranks: Sequence[RunningRank], *, is_draining: bool, now: float, come_by: float) -> Verdict:
    """Tell how a run stands. come_by: until when every rank should have taken the start.

    Ranks that are back without a reason wait: another pod's rank may have failed, and its operator's /stop is on the way.
    """
    if any(rank.is_failure for rank in ranks):
        return Verdict.CRASHED
    has_event = is_draining or any(rank.acknowledged for rank in ranks)
    if all(rank.status is not None or (has_event and rank.is_back) for rank in ranks):
        return Verdict.LEFT
    if now >= come_by and any(rank.status is None and not rank.has_come for rank in ranks):
        return Verdict.NEVER_CAME
    return Verdict.GOES_ON
