"""Requests for the status of agents: long polls over a connection of our own, and other requests over the general HTTP client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import aiohttp

from .. import clock
from ..core.silence import HEARTBEAT
from .authentication import Response
from .budgets import ByteBudget
from .polled_agent import PolledAgent, with_kernel_activity
from .polls import PollConnection, PollInterrupted, TooLarge, UnsupportedResponse
from .responses import decode_json, read_response
from .status import MAX_RESPONSE_BYTES, AgentStatus, InvalidStatus, parse_status

log = logging.getLogger(__name__)

T = TypeVar("T")

# The agent holds a long poll this long; with the limits below an answer comes at least once a heartbeat.
LONG_POLL_S = HEARTBEAT.total_seconds() - 1
CONNECT_S = 2.0
# How long a busy operator may take to read an answer that came in time.
READING_S = 1.0


def open_session() -> aiohttp.ClientSession:
    """Give a session for calls to agents: no decompression (a small response must not become a large one), no cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept-Encoding": "identity"},
    )


class ReadTooLate(TimeoutError):
    """An answer came, but this operator stood still and read it long afterwards."""


async def in_time(call: Awaitable[T], limit_s: float) -> T:
    """Give the answer to a request, which has a limit of its own. Raises ReadTooLate if it is read much later.

    An operator that stood still reads what was true before that. It must not take it for news.
    """
    loop = asyncio.get_running_loop()
    asked_at = loop.time()
    answer = await call
    if loop.time() - asked_at > limit_s + READING_S:
        raise ReadTooLate("the answer was read too late")
    return answer


class StatusRequests:
    """Asks agents for their status. parts: the budget of incomplete responses."""

    def __init__(self, session: aiohttp.ClientSession, parts: ByteBudget) -> None:
        self._session = session
        self._parts = parts

    async def ask(self, polled: PolledAgent, poll_s: Callable[[PolledAgent], float]) -> AgentStatus:
        """Ask an agent for its status, and with a long poll for a newer one than the last.

        poll_s: gives how long the agent may hold the poll, in seconds. Raises InvalidStatus, AuthenticationFailed, PollInterrupted,
        and what connections raise.
        """
        if polled.version is not None and not polled.needs_http_client:
            try:
                return await self._poll(polled, polled.version, poll_s)
            except UnsupportedResponse as error:
                log.info("agent at %s is polled by the general client: %s", polled.address.url(""), error)
                polled.needs_http_client = True
        target, limit_s = "/status", CONNECT_S + 1
        if polled.version is not None:
            target += f"?after={polled.version}&wait={LONG_POLL_S:g}"
            limit_s += LONG_POLL_S
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_S)
        url = polled.address.url(target)
        hold = partial(self._parts.change, polled.address.job)

        async def get(headers: dict[str, str]) -> Response:
            async with self._session.get(url, timeout=timeout, allow_redirects=False, headers=headers) as response:
                return await read_response(response, hold)

        async def send(headers: dict[str, str]) -> Response:
            return await in_time(get(headers), limit_s)

        reply = await polled.authenticator.exchange("GET", target, b"", send)
        _check(reply.status)
        return parse_status(decode_json(reply.body), polled.fact, clock.now())

    async def _poll(self, polled: PolledAgent, version: int, poll_s: Callable[[PolledAgent], float]) -> AgentStatus:
        """Poll for a newer status over a persistent connection; these are nearly all calls while jobs train."""
        if polled.connection is None:
            address = polled.address
            hold = partial(self._parts.change, address.job)
            polled.connection = PollConnection(address.ip, address.port, MAX_RESPONSE_BYTES, hold)
        connection = polled.connection
        wait_s = poll_s(polled)
        polled.is_long = wait_s > LONG_POLL_S
        target = f"/status?after={version}&wait={wait_s:g}"

        async def send(headers: dict[str, str]) -> Response:
            limit_s = wait_s + CONNECT_S + 1
            return await in_time(connection.ask(target, CONNECT_S, limit_s, headers), limit_s)

        try:
            reply = await polled.authenticator.exchange("GET", target, b"", send)
        except TooLarge as error:
            raise InvalidStatus(str(error)) from error
        except (OSError, PollInterrupted) as error:
            is_silent = isinstance(error, TimeoutError) and not isinstance(error, ReadTooLate)
            if polled.is_long and not is_silent:
                polled.fact = with_kernel_activity(polled)  # it has been silent since then
            raise
        finally:
            is_long, polled.is_long = polled.is_long, False
        _check(reply.status)
        now = clock.now()
        answer = decode_json(reply.body)
        if is_long:  # the agent was alive all the time
            polled.fact = replace(polled.fact, last_answer=now)
        return parse_status(answer, polled.fact, now)


def _check(status: int) -> None:
    if status != 200:
        raise InvalidStatus(f"the agent answers /status with HTTP {status}")
