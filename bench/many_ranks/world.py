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

from elastipod.checkpoint.communicator import Communicator
from elastipod.checkpoint.hierarchy import HierarchicalCollectives, Hierarchy


@dataclass(slots=True)
class Cost:
    """Of one rank: bytes that it sent and got, connections that it has, and its processor time."""

    sent_bytes: int = 0
    got_bytes: int = 0
    connections: int = 0
    cpu_s: float = 0.0


class SimulatedNetwork:
    """All that the ranks of one world have said and nobody has heard yet."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, int, int], SimpleQueue[bytes]] = {}
        self._lock = threading.Lock()

    def queue(self, name: str, source: int, to: int) -> SimpleQueue[bytes]:
        with self._lock:
            return self._queues.setdefault((name, source, to), SimpleQueue())


class SimulatedCollectives:
    """A `Collectives` among threads; counts as a star, which is what gloo's gather is, and as gloo's full mesh of connections."""

    def __init__(self, network: SimulatedNetwork, name: str, rank: int, size: int, cost: Cost) -> None:
        self.rank, self.size = rank, size
        self._network, self._name, self._cost = network, name, cost
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
        self._network.queue(self._name, self.rank, to).put(data)

    def _receive(self, source: int) -> bytes:
        data = self._network.queue(self._name, source, self.rank).get()
        self._cost.got_bytes += len(data)
        return data


class SimulatedCommunicator(Communicator):
    """The library's `Communicator` with connections in memory; of its methods, those of the training's thread."""

    def __init__(self, network: SimulatedNetwork, rank: int, hierarchy: Hierarchy, cost: Cost) -> None:
        self._rank, self._world_size, self._hierarchy = rank, hierarchy.world_size, hierarchy
        members = hierarchy.members(rank)
        subgroup = SimulatedCollectives(network, f"team {members[0]}", rank - members[0], len(members), cost)
        leads = rank == members[0] and len(hierarchy.leaders) > 1
        leaders = (
            SimulatedCollectives(network, "leaders", hierarchy.leaders.index(rank), len(hierarchy.leaders), cost)
            if leads
            else None
        )
        self._training = HierarchicalCollectives(subgroup, leaders)


def run(
    world_size: int, body: Callable[[SimulatedCommunicator], Any], hierarchy: Hierarchy | None = None
) -> tuple[list[Cost], list[Any]]:
    """Run ``body`` on so many ranks; give what it cost and returned, by rank. Raises what the first failed rank raised."""
    network, costs = SimulatedNetwork(), [Cost() for _ in range(world_size)]
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def live(rank: int) -> None:
        began = time.thread_time()
        try:
            results[rank] = body(
                SimulatedCommunicator(network, rank, hierarchy or Hierarchy.of(world_size), costs[rank])
            )
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
