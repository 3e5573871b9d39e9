"""Messages between the agent, the fork server and forked workers: one bounded line of JSON each, with file descriptors attached."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

MAX_MESSAGE = 4 * 1024 * 1024
MAX_DESCRIPTORS = 64  # in one message; the kernel's own limit is 253
_CHUNK = 64 * 1024


class BadMessage(ValueError):
    """The other side sent something that is not a message."""


def pack(message: dict[str, Any]) -> bytes:
    """Encode a message. Raises BadMessage if it is too long."""
    data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(data) > MAX_MESSAGE:
        raise BadMessage(f"a message of {len(data)} bytes is too long")
    return data


class MessageReader:
    """Reassembles messages from chunks."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add a chunk; give the messages that are complete. Raises BadMessage."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_MESSAGE:
            raise BadMessage("a message without an end")
        return [_parsed(line) for line in lines]


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise BadMessage(f"no JSON: {line[:80]!r}") from error
    if not isinstance(message, dict):
        raise BadMessage(f"no object: {line[:80]!r}")
    return message


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Wait for one message and its descriptors, which the caller then owns; None if the other side has closed.

    The sender waits for an answer before its next message, so no part of that can arrive with this one.
    """
    lines, descriptors = MessageReader(), list[int]()
    while True:
        try:
            data, new, _, _ = socket.recv_fds(end, _CHUNK, MAX_DESCRIPTORS)
        except ConnectionError:
            data, new = b"", []
        descriptors += new
        if not data:
            close_all(descriptors)
            return None
        messages = lines.feed(data)
        if messages:
            return messages[0], descriptors


def send(end: socket.socket, message: dict[str, Any]) -> None:
    """Send a message. Raises OSError if the other side has closed."""
    end.sendall(pack(message))


def close_all(descriptors: list[int]) -> None:
    """Close the descriptors of a message."""
    for descriptor in descriptors:
        os.close(descriptor)
