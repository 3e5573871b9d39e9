"""Waits until the store of rank 0 listens: clients retry within milliseconds, where torch waits about half a second.

The ranks of one start connect at nearly the same time, so most of them find rank 0's port still closed. torch's store client then
sleeps 250 to 750 ms, its first back-off, which is most of a warm restart and several times a whole resize in memory.

Each rank probes at random times, less often the more ranks there are: all ranks together at most PROBES_PER_S times a second.
"""

from __future__ import annotations

import itertools
import random
import socket
import time
from collections.abc import Iterator

_TRY_S = 0.5
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.05
PROBES_PER_S = 5000  # of all ranks together; a refused connection costs the node of rank 0 some microseconds


def wait_until_listening(host: str, port: int, limit_s: float, world_size: int = 1) -> bool:
    """Return True once this port accepts a connection, which is closed again, False after the limit. Never raises OSError."""
    deadline = time.monotonic() + limit_s
    # Forked processes share the state of Python's generator and would all probe at the same times.
    for pause_s in pauses(world_size, random.SystemRandom()):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        try:
            socket.create_connection((host, port), min(left_s, _TRY_S)).close()
            return True
        except OSError:
            time.sleep(min(left_s, pause_s))
    return False


def pauses(world_size: int, chance: random.Random) -> Iterator[float]:
    """Give the pauses between the probes of one rank: random, growing, and long enough for the limit of all ranks together."""
    shortest = world_size / PROBES_PER_S
    for tries in itertools.count():
        pause_s = max(shortest, min(_FIRST_PAUSE_S * 1.5 ** min(tries, 20), _LONGEST_PAUSE_S))
        yield pause_s * chance.uniform(0.75, 1.25)
