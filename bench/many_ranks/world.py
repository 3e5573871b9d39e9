"""A simulated world of ranks: threads of one process that speak through memory, so that a thousand of them fit on one machine.

What they run is the library's own code but for the connections. Nothing here says how quick a network is: it counts what goes
over connections, and the processor's time of each rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from elastipod.checkpoint.communicator import Exchange
from elastipod.checkpoint.hierarchy import Relay, Teams


@dataclass(slots=True)
class Cost:
    """Of one rank: bytes that it sent and got, connections that it has, and its processor time."""

    sent_bytes: int = 0
    got_bytes: int = 0
    connections: int = 0
    cpu_s: float = 0.0


class Wires:
    """All that the ranks of one world have said and nobody has heard yet."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int, int], SimpleQueue[bytes]] = {}
        self._lock = threading.Lock()

    def queue(self, name: str, source: int, to: int) -> SimpleQueue[bytes]:
        with self._lock:
            return self._queues.setdefault((name, source, to), SimpleQueue())


class MemoryLink:
    """A `Link` among threads; counts as a star, which is what gloo's gather is, and as gloo's full mesh of connections."""

    def __init__(self, wires: Wires, name: str, rank: int, size: int, cost: Cost) -> None:
        self.rank, self.size = rank, size
        self._wires, self._name, self._cost = wires, name, cost
        cost.connections += size - 1

    def gather(self, data: bytes) -> list[bytes]:
        if self.rank:
            self._send(0, data)
            return []
        return [data, *(self._receive(rank) for rank in range(1, self.size))]

    def broadcast(self, data: bytes) -> bytes:
        """As a binomial tree, the way that gloo does it."""
        mask = 1
        while mask < self.size:
            if self.rank < mask and self.rank + mask < self.size:
                self._send(self.rank + mask, data)
            elif mask <= self.rank < 2 * mask:
                data = self._receive(self.rank - mask)
            mask *= 2
        return data

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        if self.rank:
            return self._receive(0)
        for to in range(1, self.size):
            self._send(to, parts[to])
        return parts[0]

    def _send(self, to: int, data: bytes) -> None:
        self._cost.sent_bytes += len(data)
        self._wires.queue(self._name, self.rank, to).put(data)

    def _receive(self, source: int) -> bytes:
        data = self._wires.queue(self._name, source, self.rank).get()
        self._cost.got_bytes += len(data)
        return data


class SimulatedExchange(Exchange):
    """The library's `Exchange` with connections in memory; of its methods, those of the training's thread."""

    def __init__(self, wires: Wires, rank: int, teams: Teams, cost: Cost) -> None:
        self._rank, self._world_size, self._teams = rank, teams.world_size, teams
        members = teams.members(rank)
        team = MemoryLink(wires, f"team {members[0]}", rank - members[0], len(members), cost)
        leads = rank == members[0] and len(teams.leaders) > 1
        leaders = MemoryLink(wires, "leaders", teams.leaders.index(rank), len(teams.leaders), cost) if leads else None
        self._meeting = Relay(team, leaders)


def run(
    world_size: int, body: Callable[[SimulatedExchange], Any], teams: Teams | None = None
) -> tuple[list[Cost], list[Any]]:
    """Run ``body`` on so many ranks; give what it cost and returned, by rank. Raises what the first failed rank raised."""
    wires, costs = Wires(), [Cost() for _ in range(world_size)]
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def live(rank: int) -> None:
        began = time.thread_time()
        try:
            results[rank] = body(SimulatedExchange(wires, rank, teams or Teams.of(world_size), costs[rank]))
        except BaseException as error:  # raised by the thread that joins this one
            failures.append(error)
        costs[rank].cpu_s = time.thread_time() - began

    stack = threading.stack_size(512 << 10)
    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    threading.stack_size(stack)
    for thread in threads:
        while thread.is_alive() and not failures:
            thread.join(0.5)
    if failures:
        raise failures[0]
    return costs, results
