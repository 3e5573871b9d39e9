"""A store in memory for tests of the agreement: many clients of one server, which can die, and which counts."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class MemoryServer:
    """What a TCPStore's server does, as far as the library uses it. requests: messages received, by all clients."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.dead = False

    def client(self, timeout_s: float = 0.0) -> MemoryClient:
        if self.dead:
            raise ConnectionError("the server is dead")
        return MemoryClient(self)

    def die(self) -> None:
        with self.changed:
            self.dead = True
            self.changed.notify_all()


class MemoryClient:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    def set(self, key: str, value: bytes) -> None:
        self.set_many({key: value})

    def get(self, key: str) -> bytes:
        return self.get_many([key])[0]

    def add(self, key: str, amount: int) -> int:
        with self._server.changed:
            self._ask(f"add {key}")
            value = int(self._server.values.get(key, b"0")) + amount
            self._server.values[key] = str(value).encode()
            self._server.changed.notify_all()
            return value

    def has(self, key: str) -> bool:
        with self._server.changed:
            self._ask(f"has {key}")
            return key in self._server.values

    def set_many(self, values: dict[str, bytes]) -> None:
        with self._server.changed:
            self._ask(f"set {' '.join(values)}")
            self._server.values.update(values)
            self._server.changed.notify_all()

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        with self._server.changed:
            self._ask(f"get {' '.join(keys)}")
            return [self._server.values[key] for key in keys]

    def wait(self, key: str, timeout_s: float) -> None:
        with self._server.changed:
            self._ask(f"wait {key}")
            there = self._server.changed.wait_for(lambda: key in self._server.values or self._server.dead, timeout_s)
            if self._server.dead:
                raise ConnectionError("the server is dead")
            if not there:
                raise TimeoutError(f"{key} did not come")

    def _ask(self, what: str) -> None:
        if self._server.dead:
            raise ConnectionError("the server is dead")
        self._server.requests.append(what)
