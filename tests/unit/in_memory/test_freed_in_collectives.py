"""Ranks that are freed while their collectives are under way come out of them at once, however the messages cross."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from tests.agent_client import until
from tests.free_ports import free_port
from tests.unit.in_memory.forked_ranks import raised_by, run_ranks
from tests.unit.in_memory.test_process_groups import kept, never, patient, place  # noqa: F401 a fixture

from elastipod.in_memory.process_groups import ProcessGroups

RANKS = 3
WORLDS = 20  # of which one in ten had a rank that did not come out, when gloo met the end of a connection in a write
LIMIT = timedelta(seconds=30)  # of a collective, which nothing else ends then

_stores: list[Any] = []


def _reduce_until_freed() -> None:
    tensor = torch.ones(1 << 16)
    while True:
        dist.all_reduce(tensor)


def test_all_ranks_come_out_of_collectives_between_living_peers() -> None:
    """As where the script of one rank has raised an error after its gradients were reduced."""
    ports, meeting = [free_port() for _ in range(WORLDS)], free_port()

    def body(rank: int) -> list[str]:
        store: Any = dist.TCPStore("127.0.0.1", meeting, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
        _stores.append(store)  # other ranks may still read it when this one has returned
        groups = kept(ProcessGroups("gloo", LIMIT))
        texts: list[str] = []
        for number, port in enumerate(ports):
            groups.connect(place(rank, RANKS, port, generation=number + 1), never)
            groups.begin_training()
            groups.await_all()
            agent = threading.Timer(0.005 + 0.0007 * number, groups.abort)
            agent.start()
            _, text = raised_by(_reduce_until_freed)
            agent.join()
            groups.leave()
            texts.append(text)
            store.add(f"left {number}", 1)
            until(lambda key=f"left {number}": store.add(key, 0) == RANKS, "all ranks to leave the world")  # type: ignore[misc]
        return [text for text in texts if "Timed out" in text] + [str(len(texts))]

    assert run_ranks(RANKS, body) == [[str(WORLDS)]] * RANKS
