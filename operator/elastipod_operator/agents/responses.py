"""Reads the answers of agents, which are bounded in size before anything else is done with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from .authentication import Reply
from .status import MAX_ANSWER_BYTES, BadAnswer


def decoded(raw: bytes) -> Any:
    """Decode the body of an answer. Raises BadAnswer."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadAnswer("the agent's /status is not JSON") from error


async def reply_of(response: aiohttp.ClientResponse, hold: Callable[[int], bool] = lambda _: True) -> Reply:
    """Read an answer of at most MAX_ANSWER_BYTES. Raises BadAnswer for a larger one. hold: as in PollConnection."""
    raw = bytearray()
    num_held = 0
    try:
        async for chunk in response.content.iter_chunked(65536):
            raw += chunk
            if len(raw) > MAX_ANSWER_BYTES:
                raise BadAnswer(f"the agent's answer is larger than {MAX_ANSWER_BYTES} bytes")
            if not hold(len(chunk)):
                raise BadAnswer("the agents of the job send too many large answers at a time")
            num_held += len(chunk)
    finally:
        hold(-num_held)
    return Reply(response.status, {name.lower(): value for name, value in response.headers.items()}, bytes(raw))
