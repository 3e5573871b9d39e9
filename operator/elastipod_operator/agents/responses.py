"""Reads the responses of agents with a limit on their size."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import aiohttp

from .authentication import Response
from .status import MAX_RESPONSE_BYTES, InvalidStatus


def decode_json(raw: bytes) -> Any:
    """Decode the body of a response. Raises InvalidStatus."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidStatus("the agent's /status is not JSON") from error


async def read_response(response: aiohttp.ClientResponse, hold: Callable[[int], bool] = lambda _: True) -> Response:
    """Read a response of at most MAX_RESPONSE_BYTES. Raises InvalidStatus for a larger one. hold: as in PollConnection."""
    raw = bytearray()
    num_held = 0
    try:
        async for chunk in response.content.iter_chunked(65536):
            raw += chunk
            if len(raw) > MAX_RESPONSE_BYTES:
                raise InvalidStatus(f"the agent's response is larger than {MAX_RESPONSE_BYTES} bytes")
            if not hold(len(chunk)):
                raise InvalidStatus("the agents of the job send too many large responses at a time")
            num_held += len(chunk)
    finally:
        hold(-num_held)
    return Response(response.status, {name.lower(): value for name, value in response.headers.items()}, bytes(raw))
