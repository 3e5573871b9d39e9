"""Shortens the wait for the store of rank 0: clients retry within milliseconds, where torch waits about half a second.

Forked workers of one start reach ``init_process_group`` at nearly the same time, so most of them find rank 0's port still closed. torch's
store client then sleeps 250 to 750 ms (its first back-off), which is most of a warm restart.

Each rank probes at random times, less often the more ranks there are: all ranks together at most PROBES_PER_S times a second.
"""

from __future__ import annotations

import functools
import itertools
import random
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

LIMIT_S = 2.0  # afterwards torch's own back-off takes over: rank 0 is more than a little late
_TRY_S = 0.5
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
PROBES_PER_S = 5000  # of all ranks together; a refused connection costs the node of rank 0 some microseconds
_POSITIONS = ("host_name", "port", "world_size", "is_master")  # of the constructor of TCPStore


def install() -> None:
    """In the fork server, after the import of torch: make clients of ``env://`` and ``tcp://`` wait for the store."""
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is not None and hasattr(rendezvous, "TCPStore"):
        rendezvous.TCPStore = patient(rendezvous.TCPStore)


def patient(store: Any) -> Any:
    """Wrap a constructor so that a client first waits until the store listens. Other uses are unchanged."""

    @functools.wraps(store, updated=())
    def connect(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(_POSITIONS, args, strict=False)), **kwargs}  # torch 2.4 names none of them
        host, port = given.get("host_name"), given.get("port")
        if given.get("is_master") is False and isinstance(host, str) and isinstance(port, int):
            world_size = given.get("world_size")
            wait_until_listening(host, port, LIMIT_S, world_size if isinstance(world_size, int) else 1)
        return store(*args, **kwargs)

    return connect


def wait_until_listening(host: str, port: int, limit_s: float, world_size: int = 1) -> None:
    """Return once this port accepts a connection, which is closed again, or after the limit. Never raises OSError."""
    deadline = time.monotonic() + limit_s
    # Forked processes share the state of Python's generator and would all probe at the same times.
    for pause_s in pauses(world_size, random.SystemRandom()):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        try:
            socket.create_connection((host, port), min(left_s, _TRY_S)).close()
            return
        except OSError:
            time.sleep(min(left_s, pause_s))


def pauses(world_size: int, chance: random.Random) -> Iterator[float]:
    """Give the pauses between the probes of one rank: random, growing, and long enough for the limit of all ranks together."""
    shortest = world_size / PROBES_PER_S
    for tries in itertools.count():
        pause_s = max(shortest, min(_FIRST_PAUSE_S * 1.5 ** min(tries, 20), _LONGEST_PAUSE_S))
        yield pause_s * chance.uniform(0.75, 1.25)
