"""An agent's HTTP side in this process, whose answers the test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from aiohttp import web
from tests import web_servers
from tests.patience import PATIENCE_S

from elastipod_operator.agents.polled_agent import Address

JOB = "job-uid"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class FakeAgent:
    """Answers /status with `status`, as a long poll where asked so, and notes every POST."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {"status": "ready", "protocol": 1, "version": 1, "generation": 0}
        self.polls: list[dict[str, str]] = []
        self.posts: list[tuple[str, Any]] = []
        self.shown: list[str | None] = []
        self.token = ""
        self.post_code = 200
        self.respond: Handler | None = None
        self.closing = False
        self.address = Address(JOB, "", 0)
        self._changed = asyncio.Event()

    def say(self, **changes: Any) -> None:
        """Change the status, as a new version."""
        self.status = {**self.status, **changes, "version": self.status.get("version", 0) + 1}
        self._changed.set()
        self._changed = asyncio.Event()

    def _knows(self, request: web.Request) -> bool:
        self.shown.append(request.headers.get("Authorization"))
        return not self.token or self.shown[-1] == f"Bearer {self.token}"

    async def get(self, request: web.Request) -> web.StreamResponse:
        self.polls.append(dict(request.query))
        if not self._knows(request):
            return _refusal()
        if self.respond is not None:
            return await self.respond(request)
        if request.query.get("after") == str(self.status.get("version")) and not self.closing:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(request.query["wait"])):
                    await self._changed.wait()
        return web.json_response(self.status)

    async def post(self, request: web.Request) -> web.StreamResponse:
        if not self._knows(request):
            return _refusal()
        self.posts.append((request.path, await request.json() if request.can_read_body else None))
        return web.json_response(self.status, status=self.post_code)


def _refusal() -> web.Response:
    """Refuse a call as an agent of the previous version does."""
    return web.json_response({"detail": "who are you?"}, status=401, headers={"WWW-Authenticate": "Bearer"})


@contextlib.asynccontextmanager
async def serving(agent: FakeAgent) -> AsyncIterator[FakeAgent]:
    """Serve a stand-in on a port of loopback."""
    application = web.Application()
    application.add_routes([web.get("/status", agent.get), web.post("/{path}", agent.post)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=web_servers.SHUTDOWN_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        agent.address = Address(JOB, "127.0.0.1", runner.addresses[0][1])
        yield agent
    finally:
        agent.closing = True
        agent.say()
        await web_servers.end(runner)


async def until(holds: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "it did not come about in time"
        await asyncio.sleep(0.005)
