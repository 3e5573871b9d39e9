"""Which sockets of a process are its connections to peers, and what ending them does to others: nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from elastipod.in_memory import peer_connections
from elastipod.in_memory.peer_connections import PeerConnections, open_sockets


class Pair:
    """A connection over TCP within this process, to a port of its own."""

    def __init__(self, stack: ExitStack, family: socket.AddressFamily = socket.AF_INET) -> None:
        host = "::1" if family == socket.AF_INET6 else "127.0.0.1"
        self.listener = stack.enter_context(socket.create_server((host, 0), family=family))
        self.port: int = self.listener.getsockname()[1]
        self.near = stack.enter_context(socket.create_connection((host, self.port)))
        self.far = stack.enter_context(self.listener.accept()[0])

    @property
    def is_open_at_far(self) -> bool:
        self.far.setblocking(False)
        try:
            return self.far.recv(1) != b""
        except BlockingIOError:
            return True
        except ConnectionResetError:  # something was not read
            return False

    @property
    def is_open(self) -> bool:
        """Whether neither side would read the end of the connection next."""
        for side in (self.near, self.far):
            side.setblocking(False)
            with suppress(BlockingIOError):
                assert side.recv(1) == b""
                return False
        return True


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_open_sockets_are_named_by_their_descriptors(stack: ExitStack, tmp_path: Path) -> None:
    before = open_sockets()
    one, other = (stack.enter_context(each) for each in socket.socketpair())
    stack.enter_context((tmp_path / "file").open("w"))
    opened = {number: name for number, name in open_sockets().items() if number not in before}
    assert opened == {each.fileno(): f"socket:[{os.fstat(each.fileno()).st_ino}]" for each in (one, other)}


def test_where_the_kernel_lists_no_files_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_connections, "_OPEN_FILES", str(tmp_path / "none"))
    assert open_sockets() == {}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "3").write_text("no link: it was closed meanwhile")
    (tmp_path / "other" / "4").symlink_to("socket:[77]")
    (tmp_path / "other" / "5").symlink_to("/dev/null")
    monkeypatch.setattr(peer_connections, "_OPEN_FILES", str(tmp_path / "other"))
    assert open_sockets() == {4: "socket:[77]"}


def test_connections_that_were_opened_since_end_and_nothing_else(stack: ExitStack) -> None:
    """Not a connection from before, not one of the store, no listener, no pipe between threads, and no socket that was reused."""
    former = Pair(stack)
    before = open_sockets()
    peer, store = Pair(stack), Pair(stack)
    local, _ = (stack.enter_context(each) for each in socket.socketpair())
    reused = stack.enter_context(socket.create_connection(("127.0.0.1", peer.port)))
    number = reused.fileno()
    connections = PeerConnections(before, store.port)
    stack.callback(connections.close)
    os.dup2(former.near.fileno(), number)
    assert connections.end_reading() == 2, "both ends of it are in this process"
    assert not peer.is_open
    assert [former.is_open, store.is_open] == [True, True]
    assert stack.enter_context(socket.create_connection(("127.0.0.1", peer.port))), "it still listens"
    assert local.send(b"x") == 1
    assert peer.near.fileno() in open_sockets(), "who opened it closes it"


def test_no_write_fails_on_either_side_before_the_connection_is_closed(stack: ExitStack) -> None:
    """gloo forgets who waits for a message that it could not write, because the connection had ended."""
    pair = Pair(stack)
    others = {number: name for number, name in open_sockets().items() if number != pair.near.fileno()}
    connections = PeerConnections(others, 1)
    assert connections.end_reading() == 1
    assert pair.near.recv(1) == b""
    pair.near.sendall(b"near")
    pair.near.close()  # as gloo does
    assert pair.far.recv(8) == b"near"
    pair.far.sendall(b"far")
    assert pair.is_open_at_far
    connections.close()
    assert not pair.is_open_at_far


def test_connections_that_are_opened_later_can_be_added(stack: ExitStack) -> None:
    before = open_sockets()
    first = Pair(stack)
    connections = PeerConnections(before, 1)
    stack.callback(connections.close)
    between = open_sockets()
    second, third = Pair(stack), None
    connections.add_opened_since(between)
    third = Pair(stack)
    assert connections.end_reading() == 4
    assert [first.is_open, second.is_open, third.is_open] == [False, False, True]


def test_what_has_been_closed_meanwhile_is_passed_over(stack: ExitStack) -> None:
    before = open_sockets()
    gone, peer = Pair(stack), Pair(stack)
    left = Pair(stack)
    connections = PeerConnections(before, 1)
    stack.callback(connections.close)
    gone.near.close()
    gone.far.close()
    left.far.shutdown(socket.SHUT_RDWR)
    left.far.close()
    left.near.shutdown(socket.SHUT_RDWR)
    assert connections.end_reading() == 2
    assert not peer.is_open


def test_connections_over_ipv6_are_peers_too(stack: ExitStack) -> None:
    before = open_sockets()
    try:
        peer = Pair(stack, socket.AF_INET6)
    except OSError:
        pytest.skip("this host has no IPv6")
    connections = PeerConnections(before, 1)
    stack.callback(connections.close)
    assert connections.end_reading() == 2
    assert not peer.is_open
