"""Calls that change the state of an agent. Each may be repeated, because it contains the generation."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from .. import clock
from .authentication import AuthenticationFailed, Authenticators, Response
from .encoded_json import EncodedJson
from .polled_agent import Address
from .responses import read_response
from .status import InvalidStatus

log = logging.getLogger(__name__)

CALL_TIMEOUT = aiohttp.ClientTimeout(total=5, sock_connect=2)
# An accepted command is not sent again until its effect can have reached the status cache.
SETTLE_S = 3.0
MAX_PARALLEL = 256
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Command:
    """One call. `key` tells equal commands from new ones."""

    pod_uid: str
    address: Address
    path: str
    body: dict[str, Any] | None
    key: tuple[object, ...]


class CommandSender:
    """Sends commands to agents in parallel, each at most once in SETTLE_S."""

    def __init__(self, session: aiohttp.ClientSession, authenticators: Authenticators | None = None) -> None:
        self._session = session
        self._authenticators = authenticators or Authenticators()
        self._slots = asyncio.Semaphore(MAX_PARALLEL)
        self._sent: dict[tuple[object, ...], float] = {}

    async def send(self, commands: list[Command]) -> list[str]:
        """Send all commands that are due; gives one sentence for each failure. The caller checks again later in any case."""
        self._forget_settled()
        due = [c for c in commands if (c.pod_uid, *c.key) not in self._sent]
        parts: dict[int, str] = {}
        results = await asyncio.gather(*(self._call(command, parts) for command in due))
        return [problem for problem in results if problem]

    def _forget_settled(self) -> None:
        """Those sent first are first in the dict."""
        limit = clock.steady() - SETTLE_S
        settled = list(itertools.takewhile(lambda key: self._sent[key] <= limit, self._sent))
        for key in settled:
            del self._sent[key]

    async def _call(self, command: Command, parts: dict[int, str]) -> str:
        url = command.address.url(command.path)
        try:
            async with self._slots:
                response = await self._exchange(
                    command, b"" if command.body is None else _serialized(command.body, parts)
                )
        except (aiohttp.ClientError, TimeoutError, OSError, AuthenticationFailed, InvalidStatus) as error:
            return f"POST {url} failed: {type(error).__name__} {error}"
        if response.status == 409:
            log.info("POST %s was refused as outdated", url)
            return ""
        if response.status != 200:
            return (
                f"POST {url} was answered with HTTP {response.status}: {response.body[:300].decode(errors='replace')}"
            )
        key = (command.pod_uid, *command.key)
        self._sent.pop(key, None)
        self._sent[key] = clock.steady()
        return ""

    async def _exchange(self, command: Command, body: bytes) -> Response:
        url, content_type = command.address.url(command.path), JSON if body else {}

        async def send(headers: dict[str, str]) -> Response:
            async with self._session.post(
                url, data=body or None, timeout=CALL_TIMEOUT, allow_redirects=False, headers=headers | content_type
            ) as response:
                return await read_response(response)

        return await self._authenticators.of(command.address.credentials).exchange("POST", command.path, body, send)


def _serialized(body: Mapping[str, Any], parts: dict[int, str]) -> bytes:
    """Give a body as JSON. parts: serialized lists and objects that many commands share, by id."""
    small = {key: value for key, value in body.items() if not isinstance(value, list | dict | EncodedJson)}
    text = json.dumps(small)[:-1]
    for key in body.keys() - small.keys():
        part = parts.get(id(body[key]))
        if part is None:
            value = body[key]
            part = parts[id(value)] = _part(value, parts)
        text += f"{', ' if len(text) > 1 else ''}{json.dumps(key)}: {part}"
    return f"{text}}}".encode()


def _part(value: EncodedJson | dict[str, Any] | list[Any], parts: dict[int, str]) -> str:
    if isinstance(value, EncodedJson):
        return value.text
    return _serialized(value, parts).decode() if isinstance(value, dict) else json.dumps(value)
