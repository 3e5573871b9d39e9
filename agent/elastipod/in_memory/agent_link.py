"""A rank's link to its agent: where the next generation finds it, and whether this one is over. Imports no torch."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from elastipod.elastic_event import reset_elastic_event
from elastipod.ipc.clients import InProcessRestartSocketClient
from elastipod.ipc.connections import AnswerIsLate, HyperPodIPCException
from elastipod.ipc.protocol import SOCKET_ENV, STORE_ENV, RestartMode
from elastipod.local_worker import local_worker, store_generation
from elastipod.string_enum import StringEnum
from elastipod.variables import int_from_env
from elastipod.worker_file import EventLevel

log = logging.getLogger(__name__)

WATCH_S = 5.0  # after a planned end no answer comes; a watcher has a thread, and one of the few connections that a worker may have
CLOSE_S = 2.0  # for a watcher that frees this rank already
OWN_STOP_S = 8.0  # an operator calls all agents within milliseconds; one without an answer for 5 s is called again a second later
OWN_STOP_POLL_S = 0.01
_HANDLING_ENVS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")  # torch reads the first that is set
Kind = Literal["replicated", "sharded"]


@dataclass(frozen=True, slots=True)
class WorldPlace:
    """This rank's place in one generation, and where its ranks meet. store: host:port of the agent that serves their store, if one does."""

    generation: int
    rank: int
    world_size: int
    address: str
    port: int
    store: str = ""

    @classmethod
    def from_env(cls) -> WorldPlace | None:
        """Give the place that the launcher set; None outside one, and for a process that has no rank yet."""
        env, rank = os.environ, int_from_env("RANK", -1)
        if rank < 0 or "MASTER_ADDR" not in env:
            return None
        return cls(
            store_generation(),
            rank,
            int_from_env("WORLD_SIZE", 1),
            env["MASTER_ADDR"],
            int_from_env("MASTER_PORT"),
            env.get(STORE_ENV, ""),
        )


class Fate(StringEnum):
    """What becomes of a rank, and of the state that it holds, when it has stopped for a planned change."""

    STAYS = "stay"
    LEAVES = "leave"
    # Its process is kept, as long as its pod stays; whether that does is not decided yet.
    KEPT = "kept"
    UNKNOWN = "unknown"


def fate_after_stop(*, leaves: bool | None, kept: bool | None) -> Fate:
    """Tell what becomes of this rank over a drain, from the worker file.

    kept None: an operator that says only which pods stay. Its agents keep processes that return to the barrier.
    """
    if leaves:
        return Fate.LEAVES
    if leaves is False and kept is not False:
        return Fate.STAYS
    return Fate.KEPT if kept else Fate.UNKNOWN


def own_fate(is_over: Callable[[], bool], wait_s: float = OWN_STOP_S) -> Fate:
    """Tell what becomes of this rank, which has stopped with all others.

    The event of one pod stops all ranks. The stop of this one's, which says whether it stays, may still be on its way: it is waited
    for, for wait_s seconds at most and no longer than the generation lasts.
    """
    worker = local_worker()
    if worker is None:
        return Fate.UNKNOWN
    limit = time.monotonic() + wait_s
    while worker.file.event().level == EventLevel.NONE and time.monotonic() < limit and not is_over():
        time.sleep(OWN_STOP_POLL_S)
    return fate_after_stop(leaves=worker.file.leaves(), kept=worker.file.kept())


class AgentLink:
    """The agent of this pod, for one rank. A thread waits for the agent to say that the generation is over."""

    def __init__(self, client: InProcessRestartSocketClient) -> None:
        self._client = client
        self._is_over = threading.Event()
        self._watched_generation = -1
        self._news = threading.Lock()  # whether news of a generation still concerns this rank is decided under it
        self._began_at_barrier = int_from_env("RANK", -1) < 0  # as workers of --inprocess-restart do
        self.is_kept = False

    @classmethod
    def connect(cls) -> AgentLink | None:
        """Give the link; None outside a pod that hyperpodrun started. Raises HyperPodIPCException."""
        return cls(InProcessRestartSocketClient()) if os.environ.get(SOCKET_ENV) else None

    def announce(self, kind: Kind) -> None:
        """Tell the agent that this process can stay when its generation ends, and say once if it cannot be kept."""
        self.is_kept = self._client.keep(kind) or self._began_at_barrier
        if not self.is_kept:
            log.warning(
                "this agent ends worker processes with their generation, so every resize and recovery restarts this script; "
                "a newer hyperpodrun, or one with --inprocess-restart, keeps them"
            )
        name = next((each for each in _HANDLING_ENVS if each in os.environ), "")
        if self.is_kept and name and os.environ[name] != "0":  # an agent leaves what the user has set
            log.warning(
                "%s=%s: with NCCL, torch ends this process when a peer is lost, or lets a step count that the loss has spoilt; "
                "remove it, or set it to 0",
                name,
                os.environ[name],
            )

    def park(self, *, after_fault: bool = False) -> WorldPlace:
        """Wait at the barrier for the next generation, for as long as the operator takes; give this rank's place in it.

        A process that was started for a generation is released into it at once.

        after_fault: other ranks may be gone, so nobody waits for them to sign off from the agreement on an event, and no agent begins the
        next generation before the operator has heard of it.
        """
        self._unwatch()
        reset_elastic_event(is_abandoned=after_fault)
        _, start = self._client.enter_next_run(has_left=not after_fault)
        os.environ.update(start["worker_envs"])
        place = WorldPlace.from_env()
        if place is None:
            raise HyperPodIPCException(
                "the agent released this rank from the barrier without a rank in the new generation"
            )
        return place

    def watch(self, generation: int, on_end: Callable[[], None] = lambda: None) -> None:
        """Begin to wait for the end of a generation. on_end: called by the watching thread once the agent has said so."""
        self._is_over = is_over = threading.Event()
        thread = threading.Thread(
            target=self._watch,
            args=(generation, self._client.run, is_over, on_end),
            name="elastipod-generation-watcher",
            daemon=True,
        )
        self._watched_generation = generation
        thread.start()

    def close(self) -> None:
        """Close the connections. A watcher that still waits keeps its own until the agent answers or the process ends."""
        self._unwatch()
        self._client.close()

    def _unwatch(self) -> None:
        """This rank has left the generation that was watched: its watcher frees nobody any more, and so nobody from the next one."""
        is_free = self._news.acquire(timeout=CLOSE_S)
        self._watched_generation = -1
        if is_free:
            self._news.release()

    @property
    def is_over(self) -> bool:
        """Whether the agent has said that the generation is over."""
        return self._is_over.is_set()

    def wait_until_over(self, timeout_s: float) -> bool:
        """Wait until the agent says that the generation is over; False when it has not in time."""
        return self._is_over.wait(timeout_s)

    @property
    def run(self) -> int:
        """The agent's number of the generation that this rank was last released into."""
        return self._client.run

    def report_fault(self, rank: int, message: str, run: int | None = None) -> None:
        """Tell the agent that a collective failed, unless it has called this rank back already: the fault may be a network's.

        run: that it happened in, the present one by default. The agent ignores what belongs to a former one.
        """
        if self.is_over:
            return
        try:
            failed_in = self._client.run if run is None else run
            self._client.send_fault_of(failed_in, rank, RestartMode.IN_PROCESS_RESTART, "CollectiveFailed", message)
        except HyperPodIPCException as error:
            log.warning("the agent was not told of a failed collective: %s", error)

    def _watch(self, generation: int, run: int, is_over: threading.Event, on_end: Callable[[], None]) -> None:
        """Wait for the end of a run. The watcher of the run before may still wait, and must not take the news from this one."""
        while not is_over.is_set() and self._watched_generation == generation:
            try:
                self._client.wait_end(run, WATCH_S)
            except AnswerIsLate:
                continue  # nothing has happened; is this generation still the watched one?
            except HyperPodIPCException as error:
                log.debug("the agent cannot be asked for the end of the generation: %s", error)
                time.sleep(1.0)
                continue
            with self._news:
                if self._watched_generation == generation:
                    is_over.set()
                    on_end()
