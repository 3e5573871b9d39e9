"""Ends servers of tests so that no connection is left open, which would fail a later test, whichever it is."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

SHUTDOWN_S = 0.1  # for an AppRunner: aiohttp takes 0 for no limit, and waits for a client that never says anything
_TURNS = 3  # of the loop, until a connection that was accepted is one of its server's


async def end(runner: web.AppRunner) -> None:
    """End a web server and all of its connections."""
    for site in runner.sites:
        await accept_no_more(getattr(site, "_server", None))
    await runner.cleanup()


async def accept_no_more(server: Any) -> None:
    """Let an asyncio server accept no more connections, before it is closed: it loses one that it accepted just before that."""
    loop = asyncio.get_running_loop()
    for listening in () if server is None else server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(_TURNS):
        await asyncio.sleep(0)
