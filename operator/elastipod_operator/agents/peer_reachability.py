"""Asks agents of a job whether they reach an agent that does not answer the operator."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

import aiohttp
from yarl import URL

from .. import clock
from ..core.silence import HEARTBEAT, is_answering
from .authentication import AuthenticationFailed, Authenticators, Response
from .budgets import ByteBudget
from .polled_agent import Address, PolledAgent
from .responses import decode_json, read_response
from .status import InvalidStatus, parse_reachability

log = logging.getLogger(__name__)

# Early enough to have the answers when the silence is long enough for a decision.
ASK_AFTER = timedelta(seconds=8)
ASK_EVERY_S = HEARTBEAT.total_seconds()
# Several agents are asked about a silent one, because one of them may be disconnected itself.
PEERS_ASKED = 3
# Limit on the silent agents that are checked in that time, over all jobs: a lost rack must not cause thousands of calls.
# Agents that never answered may still be starting: they get half of the checks.
MAX_PARALLEL, MAX_NEVER_ANSWERED = 32, 16
CALL_S = 4.0  # an agent tries for 2 s


class PeerReachability:
    """Makes these calls with the general client, so that long polls are not interrupted. wake: requests a pass for a job."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        authenticators: Authenticators,
        wake: Callable[[str], None],
        parts: ByteBudget,
    ) -> None:
        """parts: the budget for incomplete responses."""
        self._session = session
        self._parts = parts
        self._authenticators = authenticators
        self._wake = wake
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._asked: dict[str, float] = {}

    def check(self, silent: PolledAgent, agents: Iterable[PolledAgent]) -> None:
        """Ask other agents of the job about one that does not answer, if a check is due."""
        now, place = clock.steady(), silent.address.host_port
        since = silent.fact.last_answer or silent.fact.trying_since
        if since is None or clock.now() - since < ASK_AFTER:
            return
        self._asked = {
            known: at for known, at in self._asked.items() if now - at < ASK_EVERY_S or known in self._asking
        }
        limit = MAX_NEVER_ANSWERED if silent.fact.last_answer is None else MAX_PARALLEL
        if place in self._asked or len(self._asked) >= limit:
            return
        able = sorted(
            (one for one in agents if _can_tell(one, silent)),
            key=lambda one: (one.hash_position < silent.hash_position, one.hash_position),
        )
        if not able:
            return
        self._asked[place] = now
        task = asyncio.create_task(
            self._ask(silent, [one.address for one in able[:PEERS_ASKED]]), name=f"who reaches {place}"
        )
        self._asking[place] = task
        task.add_done_callback(lambda _: self._asking.pop(place, None))

    async def close(self) -> None:
        """Stop asking."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, silent: PolledAgent, peers: Sequence[Address]) -> None:
        asked_at = clock.now()
        words = await asyncio.gather(*(self._ask_peer(peer, silent.address.host_port) for peer in peers))
        # One agent that reaches it outweighs others that do not.
        is_reached = any(words) if any(word is not None for word in words) else None
        silent.fact = replace(silent.fact, is_reached=is_reached, peers_asked_at=asked_at)
        self._wake(silent.address.job)

    async def _ask_peer(self, peer: Address, place: str) -> bool | None:
        """Give the answer of one agent; None if it has none."""
        url = URL(peer.url("/status")).with_query(reach=place)
        target = url.raw_path_qs  # as sent, because this is what is signed

        async def send(headers: dict[str, str]) -> Response:
            timeout = aiohttp.ClientTimeout(total=CALL_S, sock_connect=CALL_S / 2)
            async with self._session.get(url, timeout=timeout, allow_redirects=False, headers=headers) as response:
                return await read_response(response, partial(self._parts.change, peer.job))

        try:
            reply = await self._authenticators.of(peer.credentials).exchange("GET", target, b"", send)
            return parse_reachability(decode_json(reply.body), place) if reply.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, InvalidStatus, AuthenticationFailed) as error:
            log.info("agent at %s did not say whether it reaches %s: %s", peer.host_port, place, error)
            return None


def _can_tell(agent: PolledAgent, silent: PolledAgent) -> bool:
    return (
        agent is not silent
        and agent.task is not None
        and agent.fact.can_reach
        and is_answering(agent.fact, clock.now())
    )
