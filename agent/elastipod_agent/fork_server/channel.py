"""Messages between the agent, the fork server and its workers: one line of JSON each, bounded, with descriptors attached."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

MAX_MESSAGE = 4 * 1024 * 1024
MAX_DESCRIPTORS = 64  # in one message; the kernel's own limit is 253
_CHUNK = 64 * 1024


class BadMessage(ValueError):
    """The other side sent what is no message of ours."""


def pack(message: dict[str, Any]) -> bytes:
    """Give a message as it goes over the wire. Raises BadMessage when it is too long."""
    data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    if len(data) > MAX_MESSAGE:
        raise BadMessage(f"a message of {len(data)} bytes is too long")
    return data


class MessageReader:
    """Puts messages together again from what arrives."""

    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Take a chunk; give the messages that are whole now. Raises BadMessage."""
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
    """Wait for one message and its descriptors, which the caller owns then; None when the other side is gone.

    The sender waits for an answer before it sends another message, so nothing of a next one can come along.
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
    """Send a message. Raises OSError when the other side is gone."""
    end.sendall(pack(message))


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that a message brought."""
    for descriptor in descriptors:
        os.close(descriptor)
