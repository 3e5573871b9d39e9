"""The TCP connections of a process group, so that a rank that waits for a lost peer can be freed by shutting them down.

A gloo collective fails when a connection closes, and only then: no abort of torch frees a rank that waits for a peer that hangs, or
whose node has lost its power or its network and closes nothing any more.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

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
        self._store_port = store_port
        self.add_opened_since(before)

    def add_opened_since(self, before: dict[int, str]) -> None:
        """Count those among them that were opened since ``before`` was taken."""
        known = set(before.values())
        self._opened |= {number: name for number, name in open_sockets().items() if name not in known}

    def shut_down(self) -> int:
        """Shut the connections down, and give their number. From any thread; the group still closes the sockets itself."""
        # All are held before any is shut down: gloo closes the others at once, and their numbers may be somebody else's then.
        held = list(self._held())
        for one in held:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:  # the peer has closed it
                continue
            finally:
                one.close()
        return len(held)

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
