"""Workers that are ready before the worker of rank 0 listens: they ask again within milliseconds, where torch waits half a second.

Warm workers of one start reach ``init_process_group`` at nearly the same moment, so that the others find rank 0's port still
closed. torch's store client then sleeps 250 to 750 ms (its first back-off), which is most of a warm restart.

Each asks at random moments, and the more ranks there are the less often: together at most PROBES_PER_S times a second, whatever the world.
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

LIMIT_S = 2.0  # afterwards torch's own back-off goes on: rank 0 is not merely a little late
_TRY_S = 0.5
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
PROBES_PER_S = 5000  # of all ranks together; a refused connection costs rank 0's node some microseconds
_POSITIONS = ("host_name", "port", "world_size", "is_master")  # of the store's constructor


def install() -> None:
    """In the fork server, after torch has been imported: clients of ``env://`` and ``tcp://`` wait for the store in this way."""
    rendezvous: Any = sys.modules.get("torch.distributed.rendezvous")
    if rendezvous is not None and hasattr(rendezvous, "TCPStore"):
        rendezvous.TCPStore = patient(rendezvous.TCPStore)


def patient(store: Any) -> Any:
    """Give a constructor that is this one, but for a client it first waits until somebody listens. Other uses are left alone."""

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
    """Come back when a connection to this port has been accepted (it is closed again), or after the limit. Never raises OSError."""
    deadline = time.monotonic() + limit_s
    # Forked processes have the state of Python's own generator in common, and would all ask at the same moments.
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
    """Give the pauses between one rank's tries: random, growing, and never so short that all ranks ask more often than they may."""
    shortest = world_size / PROBES_PER_S
    for tries in itertools.count():
        pause_s = max(shortest, min(_FIRST_PAUSE_S * 1.5 ** min(tries, 20), _LONGEST_PAUSE_S))
        yield pause_s * chance.uniform(0.75, 1.25)
