"""The state that the agent and its workers share: the newest start, fault and rank information, and what each worker reported.

The state is level-triggered. Each run has a number that only grows, and a worker says which run it knows: repeated and late calls are
recognised, and a lost connection loses nothing. All methods belong to the event loop's thread; none waits for a worker.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastipod.ipc.protocol import RestartMode
from elastipod_agent.core.checkpoint_series import CheckpointSeries
from elastipod_agent.core.inprocess_restart import RankPosition, StateKind, pod_state
from elastipod_agent.core.requests import UpdateRequest
from elastipod_agent.core.run_env import run_env
from elastipod_agent.core.worker_env import Layout
from elastipod_agent.waiting import set_within

TIMED_OUT = b'{"is_late":true}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedFault:
    """A worker's report that its run cannot continue."""

    local_rank: int
    global_rank: int
    restart_mode: RestartMode
    reason: str
    message: str


@dataclass(slots=True)
class _Rank:
    """One local rank.

    born_after: the run that was the last one when its process was started; known_run: the last run that its process knows;
    joined_run: the run in which it announced that its process can live through several; past_run: the last run whose code it has
    entered. kept_state: what it announced; kept_before: what its dead predecessor had announced, until the run in which that died is
    over. known_info: the number of the newest rank information that is of that run too, so not for its process. has_left: it said at the
    barrier that it has left the run together with all others.
    """

    born_after: int = 0
    known_run: int = 0
    joined_run: int = 0
    past_run: int = 0
    kept_state: StateKind | None = None
    kept_before: StateKind | None = None
    known_info: int = 0
    has_left: bool = False
    num_at_barrier: int = 0
    num_awaiting: int = 0
    has_failed: bool = False
    data: Any = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _RankInfo:
    """The rank information of an operator's call as JSON texts: one per local rank, and one for all."""

    worker_envs: Sequence[bytes]
    shared: bytes

    def of(self, local_rank: int) -> bytes:
        return b'{"worker_envs":' + self.worker_envs[local_rank] + b',"aggregate_worker_data":' + self.shared + b"}"


class RunCoordinator:
    """Coordinates the runs of one agent's workers.

    Answers that may be large (a start) are JSON texts, built once for all ranks.

    on_fault: called at once when a worker of the current run reports a fault. on_position_change: called when the position of a rank may
    have changed. on_report: called when worker data, labels or checkpoints changed. on_keep: called when a worker announced that its
    process can live through several runs. keep_env: the variables that such a worker sets before it builds a process group.
    followed_store: where those meet who train already, until this pod does.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        on_fault: Callable[[ReportedFault], None],
        on_report: Callable[[], None],
        on_position_change: Callable[[], None] = lambda: None,
        keep_env: Mapping[str, str] | None = None,
    ) -> None:
        self.on_position_change = on_position_change
        self.on_keep: Callable[[], None] = lambda: None
        self.keep_env = dict(keep_env or {})
        self.followed_store = ""
        self.run = 0
        self.nproc = layout.nproc
        self.is_running = False
        self.checkpoints = CheckpointSeries()
        self._layout = layout
        self._on_fault = on_fault
        self._on_report = on_report
        self._ranks = [_Rank() for _ in range(layout.nproc)]
        self._group_rank = 0
        self._restart_count = 0
        self._start: _RankInfo | None = None
        self._fault_run = 0
        self._info: _RankInfo | None = None
        self._info_number = 0
        self._changed = asyncio.Event()

    # -- the agent's side ----------------------------------------------------------------------------------------

    def begin_run(self, start: UpdateRequest, *, progress: Mapping[str, Any], is_fresh: bool) -> None:
        """Release the barrier into a new run. is_fresh: processes are started for this run alone, and have not started yet."""
        self.run += 1
        self.is_running = True
        self.followed_store = ""
        self._group_rank = start.rank
        self._restart_count = start.fault_count
        self._start = self._rank_info_of(start, progress)
        self._info, self._info_number = self._start, self._info_number + 1
        self.checkpoints.begin_run(progress)
        for rank in self._ranks:
            rank.data, rank.has_failed, rank.has_left = None, False, False
            if is_fresh:
                rank.born_after = rank.known_run = self.run - 1
                rank.kept_state = None
        self._wake()
        self._on_report()

    def end_run(self, *, is_faulty: bool) -> None:
        """Close the barrier. is_faulty: ranks that are still in this run must leave it."""
        if not self.is_running:
            return
        self.is_running = False
        self._start = self._info = None  # ranks may change until the next start
        for rank in self._ranks:
            rank.kept_before = None
        if is_faulty:
            self._fault_run = self.run
        self._wake()

    def publish_rank_info(self, update: UpdateRequest) -> None:
        """Give the ranks their information before a start."""
        self._info, self._info_number = self._rank_info_of(update, {}), self._info_number + 1
        self._wake()

    def reset_rank(self, local_rank: int, *, keeps_data: bool) -> None:
        """Reset a rank that gets a new process, which knows no run yet.

        One that is started while its predecessor's run is still open is for the next one. Until that run is over the pod keeps what it
        kept when it ran: the depth of what follows depends on it.
        """
        old = self._ranks[local_rank]
        renewed = _Rank(born_after=self.run, known_run=self.run)
        if self.is_running:
            renewed.kept_before = old.kept_state or old.kept_before
            renewed.known_info = self._info_number
        if keeps_data:
            renewed.has_failed, renewed.data = old.has_failed, old.data
        self._ranks[local_rank] = renewed
        self._on_report()

    @property
    def kept_state(self) -> StateKind | None:
        """The kind of state that all workers of this pod keep in memory together; None unless each has announced one."""
        return pod_state([rank.kept_state or rank.kept_before for rank in self._ranks])

    @property
    def have_left(self) -> bool:
        """Whether all ranks of this pod have left the last run together with those of other pods, as planned."""
        return all(rank.has_left for rank in self._ranks)

    def forget_kept_state(self) -> None:
        """Forget what was announced: the processes end."""
        for rank in self._ranks:
            rank.kept_state = rank.kept_before = None
        self._on_report()

    def mark_failed(self, local_rank: int) -> None:
        """Mark the data of a rank as that of a failed rank."""
        self._ranks[local_rank].has_failed = True
        self._on_report()

    def position(self, local_rank: int) -> RankPosition:
        """Give the position of a rank whose process is alive."""
        rank = self._ranks[local_rank]
        if rank.num_at_barrier:
            return RankPosition.AT_BARRIER
        if rank.num_awaiting:
            return RankPosition.AWAITING_RANK
        if self.run and rank.past_run == self.run:
            return RankPosition.PAST_BARRIER
        return RankPosition.RELEASED if self.is_running and self.has_joined(local_rank) else RankPosition.STARTING

    def has_joined(self, local_rank: int) -> bool:
        """Tell whether this rank takes part in the current run: it received the start, or was started for it and has called since."""
        rank = self._ranks[local_rank]
        return self.run in (rank.known_run, rank.joined_run)

    def worker_data(self) -> list[dict[str, Any]]:
        """Give the data that ranks share with all others, as /status shows it. The operator distributes it."""
        return [
            {
                "rank": self._global_rank(index),
                "group_rank": self._group_rank,
                "local_rank": index,
                "failed": rank.has_failed,
                "data": rank.data,
            }
            for index, rank in enumerate(self._ranks)
            if rank.data is not None or rank.has_failed
        ]

    def labels(self) -> dict[str, str]:
        """Merge the labels of all local ranks; if they differ, the lowest rank's count."""
        return {name: value for rank in reversed(self._ranks) for name, value in rank.labels.items()}

    # -- the workers' side, see `calls` --------------------------------------------------------------------------

    async def wait_start(self, local_rank: int, after: int, wait_s: float, *, has_left: bool = False) -> bytes:
        """Wait at the barrier for a start after the run that the rank knows. has_left: it has left that one with all others."""
        rank, after = self._ranks[local_rank], self.note_run(local_rank, after)
        rank.has_left = has_left
        rank.num_at_barrier += 1
        self.on_position_change()
        try:
            if not await self._until(lambda: self._start is not None and self.run > after, wait_s):
                return TIMED_OUT
            assert self._start is not None
            return b'{"run":%d,"start":%b}' % (self.run, self._start.of(local_rank))
        finally:
            rank.num_at_barrier -= 1
            self.on_position_change()

    async def wait_rank_info(self, local_rank: int, after: int, wait_s: float) -> bytes:
        """Wait for rank information newer than the rank's own."""
        rank = self._ranks[local_rank]
        after = max(after, rank.known_info)
        rank.num_awaiting += 1
        self.on_position_change()
        try:
            if not await self._until(lambda: self._info is not None and self._info_number > after, wait_s):
                return TIMED_OUT
            assert self._info is not None
            return b'{"number":%d,"info":%b}' % (self._info_number, self._info.of(local_rank))
        finally:
            rank.num_awaiting -= 1
            self.on_position_change()

    async def wait_fault(self, local_rank: int, after: int, wait_s: float) -> bytes:
        """Wait until a run after ``after`` must be left, one that the rank's process has lived to see."""
        after = max(after, self._ranks[local_rank].born_after)
        if not await self._until(lambda: self._fault_run > after, wait_s):
            return TIMED_OUT
        return json.dumps({"run": self._fault_run, "restart_count": self._restart_count}).encode()

    def known_run(self, local_rank: int) -> int:
        """Give the last run that the rank's process knows."""
        return self._ranks[local_rank].known_run

    def note_run(self, local_rank: int, run: int, *, is_past: bool = False) -> int:
        """Record that a process knows a run, and with is_past that it runs its code; gives the run, at most the current one."""
        rank, run = self._ranks[local_rank], min(self.run, max(run, 0))
        rank.known_run = max(rank.known_run, run)
        if is_past:
            rank.past_run = max(rank.past_run, run)
        self.on_position_change()
        return run

    def announce(self, local_rank: int, kind: StateKind) -> None:
        """Record that the process of a rank can live through several runs."""
        rank = self._ranks[local_rank]
        rank.kept_state = kind
        if self.is_running:
            rank.joined_run = self.run
        self._on_report()
        self.on_keep()

    def store_data(self, local_rank: int, data: Any) -> None:
        """Store the data that a rank shares with all others."""
        if data != self._ranks[local_rank].data:
            self._ranks[local_rank].data = data
            self._on_report()

    def store_labels(self, local_rank: int, labels: Mapping[str, str]) -> None:
        """Store the role of a rank in the model's parallelism."""
        self._ranks[local_rank].labels = labels
        self._on_report()

    def report_fault(self, local_rank: int, mode: RestartMode, reason: str | None, message: str | None) -> None:
        """Report a rank's fault: the current run cannot continue."""
        rank = self._global_rank(local_rank)
        self.mark_failed(local_rank)
        self._on_fault(
            ReportedFault(
                local_rank=local_rank,
                global_rank=rank,
                restart_mode=mode,
                reason=reason or "WorkerFault",
                message=message or f"rank {rank} reported a fault",
            )
        )

    def report_checkpoint(self, local_rank: int, prefix: str, step: int, path: str | None, kind: str) -> None:
        """Record that a rank has written its part of a checkpoint. Raises ValueError for a series beyond the limit."""
        self.checkpoints.report(prefix, step, path, kind, local_rank)
        self._on_report()

    # -- helpers -------------------------------------------------------------------------------------------------

    async def _until(self, is_met: Callable[[], bool], wait_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while not is_met():
            left = deadline - loop.time()
            if left <= 0:
                return False
            await set_within(self._changed, left)
        return True

    def _rank_info_of(self, update: UpdateRequest, progress: Mapping[str, Any]) -> _RankInfo:
        envs = [run_env(update, progress, self._layout, index) for index in range(self._layout.nproc)]
        shared = {"rank_ips": self._addresses_of_ranks(update), "aggregate_worker_data": update.worker_data}
        return _RankInfo([json.dumps(env).encode() for env in envs], json.dumps(shared, separators=(",", ":")).encode())

    def _addresses_of_ranks(self, update: UpdateRequest) -> list[Mapping[str, Any]]:
        """Give the address of each global rank. An operator that does not know how many workers a pod has names one for each pod."""
        nproc = self._layout.nproc
        pods = sorted(each.get("rank", -1) for each in update.rank_ips if isinstance(each.get("rank"), int))
        if nproc == 1 or pods != list(range(update.nnodes)):
            return list(update.rank_ips)
        return [{**each, "rank": each["rank"] * nproc + index} for each in update.rank_ips for index in range(nproc)]

    def _global_rank(self, local_rank: int) -> int:
        return self._group_rank * self._layout.nproc + local_rank

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
