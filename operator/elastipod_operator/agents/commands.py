"""Calls that change something at an agent. Each may be repeated; the generation in it makes that harmless (decision 2)."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from .board import Address

log = logging.getLogger(__name__)

CALL_TIMEOUT = aiohttp.ClientTimeout(total=5, sock_connect=2)
# A command that was taken is not sent again while its effect is on its way to the board.
SETTLE_S = 3.0
MAX_PARALLEL = 256


@dataclass(frozen=True, slots=True)
class Command:
    """One call. `key` tells equal commands from new ones."""

    pod_uid: str
    address: Address
    path: str
    body: dict[str, Any] | None
    key: tuple[object, ...]


class Commander:
    """Sends commands to agents, many at once, each at most once in SETTLE_S."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self._sent: dict[tuple[object, ...], float] = {}

    async def send(self, commands: list[Command]) -> list[str]:
        """Send all that are due; gives one sentence for each that failed. The caller looks again later in any case."""
        now = time.monotonic()
        self._sent = {key: at for key, at in self._sent.items() if now - at < SETTLE_S}
        due = [c for c in commands if (c.pod_uid, *c.key) not in self._sent]
        results = await asyncio.gather(*(self._call(command) for command in due))
        return [problem for problem in results if problem]

    async def _call(self, command: Command) -> str:
        url = command.address.url(command.path)
        try:
            async with (
                self._slots,
                self._session.post(
                    url,
                    json=command.body,
                    timeout=CALL_TIMEOUT,
                    allow_redirects=False,
                    headers=command.address.headers,
                ) as response,
            ):
                text = (await response.content.read(2048)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"POST {url} failed: {type(error).__name__} {error}"
        if response.status == 409:
            log.info("POST %s was refused as outdated", url)
            return ""
        if response.status != 200:
            return f"POST {url} was answered with HTTP {response.status}: {text[:300]}"
        self._sent[(command.pod_uid, *command.key)] = time.monotonic()
        return ""
