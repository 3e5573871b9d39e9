"""The small operator of the benchmark: drives agents of either make in the order in which the real operator does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bench.common.processes import Failed, free_port
from bench.launchers.client import POLL_S, Client

DRAIN_S = 30
READY_WITHIN_S = 60.0
FAULT_WITHIN_S = 60.0
DETECTION_POLL_S = 0.01
KEEPS = "in_process_restart"  # the restart mode that leaves workers their processes


@dataclass(frozen=True, slots=True)
class Loss:
    """What the operator saw first of a loss, and when (monotonic): FAULTED agents, or one that is gone."""

    seen_at: float
    what: str


class SmallOperator:
    """Knows the agents by group rank; threads stand for what the real operator's event loop does at once."""

    def __init__(self, restart_mode: str = "") -> None:
        """restart_mode: what a recovery asks agents to keep, in the words of /stop; empty: they are not asked."""
        self.generation = 0
        self._meets_at: dict[str, Any] = {}  # the present generation
        self._restart_mode = restart_mode
        self.members: list[Client] = []
        self._over = threading.Event()  # of the last watch, and of everything at the end
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="operator")

    def close(self) -> None:
        """Give up what is still being watched; takes as long as one long poll at most."""
        self._over.set()
        self._pool.shutdown(cancel_futures=True)

    def start(self, members: Sequence[Client]) -> float:
        """/start the next generation on these agents; gives the moment of the first call."""
        self.generation += 1
        self.members = list(members)
        self._meets_at = meets_at = {"master_addr": "127.0.0.1", "master_port": free_port()}
        if all("store" in agent.features for agent in members):
            meets_at["store_port"] = members[0].port
        at = time.monotonic()
        self._all(
            members,
            lambda rank, agent: agent.start(self.generation, rank, nnodes=len(members), meets_at=meets_at),
        )
        return at

    def prepare(self, members: Sequence[Client]) -> None:
        """Before a planned change of workers that wait at the barrier: have newcomers that can start theirs while the others train."""
        if self._restart_mode:
            newcomers = [agent for agent in members if "prepare" in agent.features and agent not in self.members]
            self._all(
                newcomers,
                lambda _, agent: agent.prepare(self.generation, len(self.members), self._meets_at, READY_WITHIN_S),
            )

    def resize(self, members: Sequence[Client]) -> float:
        """A planned change: drain all, wait until they are READY, start the new members."""
        self._stop(self.members, DRAIN_S)
        return self.start(members)

    def recover(self, members: Sequence[Client]) -> float:
        """After a loss: end what still runs on these, wait until they are READY, start them."""
        self.end(members)
        return self.start(members)

    def drain(self, staying: Sequence[Client], timeout_s: int) -> None:
        """Drain all members, telling each whether its pod leaves, in the way that this operator restarts workers; until they are READY."""
        self._all(
            self.members,
            lambda _, agent: agent.stop(self.generation, timeout_s, self._restart_mode, leaves=agent not in staying),
        )
        self._all(self.members, lambda _, agent: agent.until("ready", within_s=READY_WITHIN_S))

    def end(self, members: Sequence[Client]) -> None:
        """After a loss: end what still runs on these, until they are READY."""
        self._stop(members, None, self._restart_mode)

    def stop(self) -> None:
        """End the workers of all members; they are READY afterwards."""
        self._stop(self.members, None)
        self.members = []

    def watch(self, closely: Client) -> Callable[[], Loss]:
        """Begin to follow all members; the function that is given back waits for the first that faults or is gone.

        closely: where there is no long polling, this one is asked more often than the others.
        """
        self._over = over = threading.Event()
        seen = [
            self._pool.submit(_until_lost, agent, over, DETECTION_POLL_S if agent is closely else POLL_S)
            for agent in self.members
        ]

        def first() -> Loss:
            done, _ = wait(seen, FAULT_WITHIN_S, FIRST_COMPLETED)
            over.set()
            if not done:
                raise Failed(f"no agent told of a fault within {FAULT_WITHIN_S:g} s")
            return min((one.result() for one in done), key=lambda loss: loss.seen_at)

        return first

    def _stop(self, members: Sequence[Client], graceful_s: int | None, restart_mode: str = "") -> None:
        self._all(members, lambda _, agent: agent.stop(self.generation, graceful_s, restart_mode))
        self._all(members, lambda _, agent: agent.until("ready", within_s=READY_WITHIN_S))

    def _all(self, members: Sequence[Client], call: Callable[[int, Client], Any]) -> None:
        for done in [self._pool.submit(call, rank, agent) for rank, agent in enumerate(members)]:
            done.result()


def _until_lost(agent: Client, over: threading.Event, poll_s: float) -> Loss:
    """Follow one agent until it is FAULTED or gone, or it is over."""
    with suppress(OSError):
        agent.until("faulted", within_s=FAULT_WITHIN_S, poll_s=poll_s, is_wanted=lambda: not over.is_set())
        return Loss(time.monotonic(), "FAULTED")
    return Loss(time.monotonic(), "gone")
