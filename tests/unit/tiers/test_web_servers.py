"""Servers of tests end with all their connections, also with one that is accepted at that very moment."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

import pytest
from aiohttp import web
from tests import web_servers

TURNS = range(6)  # of the loop between a client's connection and the end


async def answer(request: web.Request) -> web.Response:
    return web.Response()


async def end_beside_a_client(turns: int) -> None:
    application = web.Application()
    application.add_routes([web.get("/", answer)])
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=web_servers.SHUTDOWN_S)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    with socket.create_connection(runner.addresses[0]):
        for _ in range(turns):
            await asyncio.sleep(0)
        await web_servers.end(runner)


@pytest.mark.parametrize("turns", TURNS)
def test_a_connection_that_is_accepted_last_is_closed_with_the_others(turns: int) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        asyncio.run(end_beside_a_client(turns))
        gc.collect()
    assert [str(each.message) for each in told] == []


async def test_what_was_never_started_is_ended_too() -> None:
    await web_servers.accept_no_more(None)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web_servers.end(runner)
    assert runner.server is None
