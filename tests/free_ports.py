"""Ports for servers of tests, each given to one of the processes that test beside each other."""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO

_PORTS = range(12_000, 29_000)  # below those that the kernel gives to outgoing connections
_MOST_KEPT = 200  # files of one process: more ports than its tests use at once
# Of the system: tests seed the generator of `random`, as each step of a training does, so others beside them would try the same ports.
_any_port = random.SystemRandom()
_kept: deque[IO[str]] = deque()


def free_port() -> int:
    """Give a port that nobody uses now, and that no other process is given for as long as this one lives.

    A server often binds it much later, as the store of a second generation does, so it is not enough that nobody has it now. A lock
    keeps it, which forks of this process hold as well.
    """
    folder = Path(tempfile.gettempdir()) / "elastipod-test-ports"
    folder.mkdir(exist_ok=True)
    while True:
        port = _any_port.choice(_PORTS)
        lock = open(folder / str(port), "w")  # noqa: SIM115 kept open
        with suppress(OSError), socket.socket() as probe:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            probe.bind(("", port))
            _keep(lock)
            return port
        lock.close()


def _keep(lock: IO[str]) -> None:
    _kept.append(lock)
    if len(_kept) > _MOST_KEPT:
        _kept.popleft().close()
