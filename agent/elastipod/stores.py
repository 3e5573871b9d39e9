"""The store operations that the agreement needs, and their implementation with torch's TCPStore.

Tests use a store in memory instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though torch does not mark it so


class Store(Protocol):
    """A shared key-value store. Every method raises ConnectionError when the store is gone."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...

    def has(self, key: str) -> bool: ...

    def set_many(self, values: dict[str, bytes]) -> None: ...

    def get_many(self, keys: Sequence[str]) -> list[bytes]: ...

    def wait(self, key: str, timeout_s: float) -> None:
        """Return once the key exists. Costs one message each way. Raises TimeoutError."""


class TorchStore:
    """A separate client connection to the TCPStore at ``host:port``, with all keys below ``prefix``."""

    def __init__(self, host: str, port: int, prefix: str, timeout_s: float, *, keep_server: bool = False) -> None:
        """Connect within ``timeout_s`` seconds. Raises TimeoutError or ConnectionError.

        keep_server: this process runs the server for its process group; keep it alive until this object is deleted, even when
        the group is destroyed earlier.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._prefix = prefix
        timeout = timedelta(seconds=timeout_s)
        with _translated():
            self._store: TCPStore = (
                TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True)
                if keep_server
                else TCPStore(host, port, is_master=False, timeout=timeout)
            )

    def set(self, key: str, value: bytes) -> None:
        with _translated():
            self._store.set(self._key(key), value.decode())

    def get(self, key: str) -> bytes:
        with _translated():
            return self._store.get(self._key(key))

    def add(self, key: str, amount: int) -> int:
        with _translated():
            return self._store.add(self._key(key), amount)

    def has(self, key: str) -> bool:
        with _translated():
            return self._store.check([self._key(key)])

    def set_many(self, values: dict[str, bytes]) -> None:
        with _translated():
            self._store.multi_set(  # type: ignore[attr-defined]  # missing in torch's stub
                [self._key(key) for key in values], [value.decode() for value in values.values()]
            )

    def get_many(self, keys: Sequence[str]) -> list[bytes]:
        with _translated():
            return self._store.multi_get([self._key(key) for key in keys])

    def wait(self, key: str, timeout_s: float) -> None:
        with _translated():
            self._store.wait([self._key(key)], timedelta(seconds=timeout_s))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


@contextmanager
def _translated() -> Iterator[None]:
    """Raise torch's store errors as TimeoutError (too late) or ConnectionError (the store is gone)."""
    from torch.distributed import DistStoreError

    try:
        yield
    except DistStoreError as error:
        raise TimeoutError(str(error)) from error
    except RuntimeError as error:  # DistNetworkError and whatever else ends a connection
        raise ConnectionError(str(error)) from error
