"""Calls from a worker to its agent over a few connections that are opened when needed and reopened when they break."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any

from elastipod.ipc.protocol import (
    MAX_ANSWER_BYTES,
    MAX_CALL_BYTES,
    PROTOCOL,
    SOCKET_ENV,
    MalformedMessage,
    decode,
    encode,
)

_CONNECT_TIMEOUT_S = 10.0  # how long to try to reach the agent
_ANSWER_TIMEOUT_S = 30.0  # for an answer, in addition to the wait that the call requests
_RETRY_INTERVAL_S = 0.05
_CHUNK = 64 * 1024
_MAX_IDLE = 4


class HyperPodIPCException(RuntimeError):
    """A call to the agent failed: it timed out, the agent is gone, or the agent refused it. The text says which."""


class AnswerIsLate(HyperPodIPCException):
    """Nothing that the caller waits for has happened within its time-out; the agent is well."""


class Connections:
    """Connections to one agent. Each serves one call at a time; threads that call at the same time use one each.

    There is no lock (list.pop and list.append are atomic), so the object is usable in a child that was forked at any moment.
    """

    def __init__(self, path: str, local_rank: int) -> None:
        self._path = path
        self._local_rank = local_rank
        self._idle: list[socket.socket] = []
        self._pid = os.getpid()

    @classmethod
    def from_env(cls) -> Connections:
        """Find the agent of this pod. Raises ValueError outside a pod that hyperpodrun started."""
        path = os.environ.get(SOCKET_ENV)
        if not path:
            raise ValueError(f"{SOCKET_ENV} is not set: start the script with hyperpodrun in a pod")
        local_rank = os.environ.get("ELASTIPOD_LOCAL_RANK") or os.environ.get("LOCAL_RANK") or "0"
        return cls(path, int(local_rank))

    def call(self, name: str, *, wait_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """Make a call and give its answer. Calls are idempotent, so after a broken connection the call is sent again.

        wait_s: how long the agent may delay the answer. Raises HyperPodIPCException.
        """
        message = {"v": PROTOCOL, "call": name, "local_rank": self._local_rank, **fields}
        if wait_s is not None:
            message["wait_s"] = wait_s
        try:
            line = encode(message)
        except MalformedMessage as error:
            raise HyperPodIPCException(f"{name}: {error}") from error
        if len(line) > MAX_CALL_BYTES:
            raise HyperPodIPCException(
                f"{name}: the message has {len(line)} bytes, and the agent takes at most {MAX_CALL_BYTES}"
            )
        answer = self._exchange(line, _ANSWER_TIMEOUT_S + (wait_s or 0.0))
        if "error" in answer:
            raise HyperPodIPCException(f"{name}: {answer['error']}")
        return answer

    def close(self) -> None:
        """Close the idle connections."""
        idle, self._idle = self._idle, []
        for one in idle:
            one.close()

    def _exchange(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + _CONNECT_TIMEOUT_S
        while True:
            connection: socket.socket | None = None
            try:
                connection = self._acquire()
                connection.settimeout(timeout_s)
                connection.sendall(line)
                answer = _read_answer(connection)
            except (OSError, MalformedMessage) as error:
                if connection is not None:
                    connection.close()
                if time.monotonic() >= deadline or isinstance(error, TimeoutError):
                    raise HyperPodIPCException(f"the agent at {self._path} does not answer: {error}") from error
                time.sleep(_RETRY_INTERVAL_S)
            except (
                BaseException
            ):  # an exception raised into this thread: the next call must not reuse a half-used connection
                if connection is not None:
                    connection.close()
                raise
            else:
                self._release(connection)
                return answer

    def _acquire(self) -> socket.socket:
        if self._pid != os.getpid():  # a forked child does not use its parent's connections
            self._pid, self._idle = os.getpid(), []
        with suppress(IndexError):
            return self._idle.pop()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_CONNECT_TIMEOUT_S)
            connection.connect(self._path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _release(self, connection: socket.socket) -> None:
        if len(self._idle) < _MAX_IDLE and self._pid == os.getpid():
            self._idle.append(connection)
        else:
            connection.close()


def _read_answer(connection: socket.socket) -> dict[str, Any]:
    chunks: list[bytes] = []
    size = 0
    while True:
        chunk = connection.recv(_CHUNK)
        if not chunk:
            raise ConnectionResetError("it closed the connection")
        chunks.append(chunk)
        size += len(chunk)
        if chunk.endswith(b"\n"):  # one answer per call, so nothing follows its newline
            return decode(b"".join(chunks))
        if size > MAX_ANSWER_BYTES:
            raise MalformedMessage(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
