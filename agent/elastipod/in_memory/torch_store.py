"""The store of an agent as one of torch's, for process groups, and which of them this process meets others at."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elastipod.agent_store import StoreConnection, get_all, set_all, wait_for
from elastipod.store_wire import number

# Has gloo read the addresses of all peers with one call, which it could do since torch 2.6 and does not by itself.
_GLOO_READS_AT_ONCE_ENV = "GLOO_ENABLE_STORE_V2_API"
_held: list[TorchAgentStore] = []


class TorchAgentStore(dist.Store):  # type: ignore[name-defined, misc]  # public, though torch does not mark it so
    """Calls come from any thread of torch. They raise torch's own errors: DistNetworkError when the store is gone, else DistStoreError."""

    def __init__(self, connection: StoreConnection) -> None:
        super().__init__()
        self._connection = connection
        # A group, which may end in the background, refers to torch's half of this object only. A closed store costs next to nothing.
        _held.append(self)
        os.environ.setdefault(_GLOO_READS_AT_ONCE_ENV, "1")

    def set(self, key: str, value: bytes | str) -> None:
        with _translated():
            self._connection.call(b"set", key.encode(), _bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def add(self, key: str, amount: int) -> int:
        with _translated():
            return int(self._connection.call(b"add", key.encode(), number(amount))[0])

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        with _translated():
            return self._connection.call(b"compare_set", key.encode(), _bytes(expected), _bytes(desired))[0]

    def check(self, keys: Sequence[str]) -> bool:
        with _translated():
            return bool(int(self._connection.call(b"check", *map(str.encode, keys))[0]))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        with _translated():
            wait_for(self._connection.call, b"wait", [key.encode() for key in keys], deadline)

    def append(self, key: str, value: bytes | str) -> None:
        with _translated():
            self._connection.call(b"append", key.encode(), _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with _translated():
            return get_all(self._connection.call, [key.encode() for key in keys], self.timeout.total_seconds())

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        with _translated():
            set_all(self._connection.call, zip(map(str.encode, keys), map(_bytes, values), strict=True))

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> TorchAgentStore:
        return self  # threads share it

    def deleteKey(self, key: str) -> bool:  # torch asks for these two by the names that they have in C++
        with _translated():
            return bool(int(self._connection.call(b"delete", key.encode())[0]))

    def getNumKeys(self) -> int:
        with _translated():
            return int(self._connection.call(b"count")[0])


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise dist.DistStoreError(str(error)) from error
    except ConnectionError as error:
        raise dist.DistNetworkError(str(error)) from error


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
