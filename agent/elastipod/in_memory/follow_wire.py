"""How a donor and its follower speak: a handshake under a key of their job, then lines of JSON and raw tensors. No pickle."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, BinaryIO

import torch

from elastipod.errors import ElastipodError
from elastipod.in_memory.tensor_digests import as_bytes

HANDSHAKE_S = 5.0
MAX_GREETING_BYTES = 512
MAX_HEAD_BYTES = 64 << 20


class FollowingEnded(ElastipodError):
    """A state is not followed any more; the text says why. The resize goes on without it."""


def shake_hands(peer: socket.socket, file: BinaryIO, key: str, layout: str, *, is_donor: bool) -> None:
    """Let each side prove that it holds the key, and that both have built the same. Raises FollowingEnded, OSError.

    file: reads from ``peer``, whose time-out for each message is that of the caller.
    """
    own, (role, other) = secrets.token_hex(16), ("donor", "follower") if is_donor else ("follower", "donor")
    send(peer, {"v": 1, "challenge": own, "layout": layout})
    told = receive(file, MAX_GREETING_BYTES)
    theirs = str(told.get("challenge"))
    send(peer, {"mac": _mac(key, role, own, theirs)})
    if not hmac.compare_digest(str(receive(file, MAX_GREETING_BYTES).get("mac")), _mac(key, other, theirs, own)):
        raise FollowingEnded(f"the {other} does not hold the key of this job")
    if (told.get("v"), told.get("layout")) != (1, layout):
        raise FollowingEnded(f"the {other} has built another model or other optimizers, or has another elastipod")


def send(peer: socket.socket, head: Mapping[str, Any], tensors: Iterable[torch.Tensor] = ()) -> None:
    """Send a JSON object, and the bytes of tensors in host memory. Raises OSError."""
    peer.sendall(json.dumps(head, separators=(",", ":")).encode() + b"\n")
    for tensor in tensors:
        raw = as_bytes(tensor)
        peer.sendall(_view(raw))


def receive(file: BinaryIO, limit: int = MAX_HEAD_BYTES) -> dict[str, Any]:
    """Receive a JSON object. Raises FollowingEnded for anything else, OSError."""
    line = file.readline(limit)
    if not line.endswith(b"\n"):
        raise FollowingEnded("the peer has hung up, or sends more than is taken")
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError, RecursionError) as error:
        raise FollowingEnded("the peer sends something that is no JSON object") from error


def receive_tensor(file: BinaryIO, tensor: torch.Tensor) -> torch.Tensor:
    """Receive the bytes of a tensor into it, and give it. Raises FollowingEnded, OSError."""
    is_host = tensor.device.type == "cpu" and tensor.is_contiguous()
    host = tensor if is_host else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    view = _view(host.detach())
    if file.readinto(view) != len(view):  # type: ignore[attr-defined]  # a socket's file has it
        raise FollowingEnded("the peer has hung up")
    return tensor if is_host else tensor.copy_(host)


def shut_down(peer: socket.socket) -> None:
    """Wake every thread that waits for this connection."""
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _view(tensor: torch.Tensor) -> memoryview:
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr()) if size else bytearray()).cast("B")


def _mac(key: str, *parts: str) -> str:
    return hmac.new(key.encode(), "\n".join(("elastipod-follow-v1", *parts)).encode(), hashlib.sha256).hexdigest()
