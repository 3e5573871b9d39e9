"""The TCP connections of a process group, so that a rank that waits for a lost peer can be freed by ending them.

A gloo collective fails when a connection ends, and only then: no abort of torch frees a rank that waits for a peer that hangs, or
whose node has lost its power or its network and closes nothing any more.

gloo must see the end of a connection by reading. When it writes to one that has ended first, it keeps the message to try again, and then
forgets who waits for it: the collective lasts until its time-out. So only the reading ends, on this side, and no connection closes
while peers may still write: both would let a write fail.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

_OPEN_FILES = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Give the descriptors of this process's sockets and the names by which the kernel tells them apart; empty but on Linux."""
    found = {}
    for name in os.listdir(_OPEN_FILES) if os.path.isdir(_OPEN_FILES) else ():
        try:
            target = os.readlink(f"{_OPEN_FILES}/{name}")
        except OSError:  # closed meanwhile, as the descriptor of the listing itself
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


class PeerConnections:
    """Those that were opened since `before` was taken, but for the connections of the store, which has `store_port`."""

    def __init__(self, before: dict[int, str], store_port: int) -> None:
        self._opened: dict[int, str] = {}
        self._ended: list[socket.socket] = []
        self._store_port = store_port
        self.add_opened_since(before)

    def add_opened_since(self, before: dict[int, str]) -> None:
        """Count those among them that were opened since ``before`` was taken."""
        known = set(before.values())
        self._opened |= {number: name for number, name in open_sockets().items() if name not in known}

    def end_reading(self) -> int:
        """Let the group read the end of each connection, and give their number. From any thread.

        The group closes its sockets itself. The connections stay open for the peers until `close`.
        """
        # All are held before any ends: gloo closes the others at once, and their numbers may be somebody else's then.
        self._ended = list(self._held())
        for one in self._ended:
            with suppress(OSError):  # the peer has closed it
                one.shutdown(socket.SHUT_RD)
        return len(self._ended)

    def close(self) -> None:
        """Close the connections that have ended: all ranks have left this world, or are to learn that this one has. From any thread."""
        ended, self._ended = self._ended, []
        for one in ended:
            one.close()

    def _held(self) -> Iterator[socket.socket]:
        for number, name in self._opened.items():
            try:
                own = os.dup(number)
            except OSError:  # it was closed meanwhile
                continue
            if os.readlink(f"{_OPEN_FILES}/{own}") != name:
                os.close(own)
                continue
            one = socket.socket(fileno=own)
            if self._is_connection_to_peer(one):
                yield one
            else:
                one.close()

    def _is_connection_to_peer(self, one: socket.socket) -> bool:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.getsockopt(
            socket.SOL_SOCKET, socket.SO_ACCEPTCONN
        ):
            return False
        try:
            ports = one.getsockname()[1], one.getpeername()[1]
        except OSError:  # it is not connected any more
            return False
        return self._store_port not in ports
