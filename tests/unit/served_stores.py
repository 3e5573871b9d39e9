"""The part of an agent that serves a store, in a thread of a test's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tests.patience import PATIENCE_S

from elastipod.store_wire import PATH
from elastipod_agent.server.http import HttpServer, Request
from elastipod_agent.server.http_messages import Response
from elastipod_agent.server.store_server import StoreServer

KEY = "the key that the workers of a job share"
T = TypeVar("T")


class ServedStore:
    """Calls into the server from the test's thread.

    refusals, warnings: what it has logged. names: of the calls of each connection, by its number.
    """

    def __init__(self, key: str = KEY, max_connections: int = 8, port: int = 0) -> None:
        self.refusals: list[str] = []
        self.warnings: list[str] = []
        self.names: dict[int, list[str]] = {}
        self.port = port
        self._key, self._max_connections = key, max_connections
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="served-store")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def begin(self, generation: int, num_ranks: int, *, is_server: bool = True) -> None:
        """A /start."""
        self.do(lambda: self._begin(generation, num_ranks, is_server))

    def end(self) -> None:
        """A hard /stop."""
        self.do(self.store.end)

    def do(self, action: Callable[[], T]) -> T:
        """Run something in the server's thread."""

        async def run() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(PATIENCE_S)

    def open(self) -> None:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(PATIENCE_S)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result(PATIENCE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _begin(self, generation: int, num_ranks: int, is_server: bool) -> None:
        self.store.begin(generation, num_ranks, is_server=is_server)
        call = self.store._keys.call

        def counted(ticket: Any, name: bytes, arguments: Any) -> Any:
            self.names.setdefault(ticket[0], []).append(name.decode())
            return call(ticket, name, arguments)

        self.store._keys.call = counted  # type: ignore[method-assign]

    async def _listen(self) -> None:
        self.store = StoreServer(self._key, lambda status, why: self.refusals.append(why), self.warnings.append)
        self._server = HttpServer(
            _answer, lambda path: 0, lambda status, why: self.refusals.append(why),
            upgrades={PATH: self.store.serve}, max_connections=self._max_connections,
        )  # fmt: skip
        self.port = await self._server.listen("127.0.0.1", self.port)

    async def _leave(self) -> None:
        self.store.close()
        await self._server.close(0)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=PATIENCE_S)


async def _answer(request: Request) -> Response:
    return Response(200, {"path": request.path})


@contextmanager
def served_store(
    generation: int | None = 1, num_ranks: int = 4, *, key: str = KEY, max_connections: int = 8
) -> Iterator[ServedStore]:
    """Serve the store of a generation; None: of none yet."""
    served = ServedStore(key, max_connections)
    served.open()
    try:
        if generation is not None:
            served.begin(generation, num_ranks)
        yield served
    finally:
        served.close()
