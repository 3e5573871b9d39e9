"""Requests to an API server that goes away in the middle of them."""

from __future__ import annotations

import socket
import ssl
import struct

import pytest

from elastipod_local.api import ClosedWhenReset


def test_a_connection_that_is_reset_before_the_handshake_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # with a reset, as by the end of its process
    context = ssl.create_default_context()
    context.sslsocket_class = ClosedWhenReset
    with pytest.raises(ConnectionResetError):  # a socket that is left open would be a warning, which is an error here
        context.wrap_socket(client, server_hostname="localhost")
