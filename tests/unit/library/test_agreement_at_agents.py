"""The agreement of ranks at a store that an agent really serves, over connections that the network cuts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tests.agent_client import until
from tests.patience import PATIENCE_S
from tests.unit.served_stores import KEY, ServedStore, served_store

from elastipod.agent_store import AgentStore, StoreConnection, open_store
from elastipod.agreement import Agreement
from elastipod.store_wire import Greeting


def agreement(connection: StoreConnection, rank: int, pending: threading.Event) -> Agreement:
    return Agreement(
        rank=rank,
        world_size=2,
        is_pending=pending.is_set,
        connect=lambda limit_s: AgentStore(connection.renewed(limit_s), "event"),
        timeout_s=PATIENCE_S,
        reconnects=True,
    )


def cut(served: ServedStore, number: int) -> None:
    """End a connection as the kernel does whose peer no longer answers."""
    served.do(lambda: served.store._connections[number]._writer.transport.abort())


def test_a_rank_whose_connection_was_cut_stops_with_the_others() -> None:
    """A cut that is over before the event must not cost the drain: nobody would know why the others wait."""
    with served_store(1, 2) as served, ThreadPoolExecutor(2) as training:
        connections = [open_store(served.address, Greeting(1, rank), KEY, PATIENCE_S) for rank in range(2)]
        events = [threading.Event() for _ in range(2)]
        ranks = [agreement(*each) for each in zip(connections, range(2), events, strict=True)]
        for each in ranks:
            each.start()
        assert [each.record_call() for each in ranks] == [False, False]
        until(lambda: len(served.do(lambda: served.store._keys._waits)) == 2, "both listeners")
        cut(served, 1)
        until(lambda: connections[1]._end, "the end of the connection")
        until(lambda: len(served.do(lambda: served.store._keys._waits)) == 2, "both listeners again")
        events[0].set()
        until(lambda: every_published(ranks), "that both have published")
        assert list(training.map(Agreement.record_call, ranks)) == [True, True]
        for rank, connection in zip(ranks, connections, strict=True):
            rank.close()
            connection.close()


def every_published(ranks: list[Agreement]) -> bool:
    return [each._published for each in ranks] == [2, 2]
