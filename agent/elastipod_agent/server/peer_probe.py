"""Probes whether another agent of the job can be reached, for an operator that gets no answer from it.

Any HTTP answer, even a refusal (401), shows that the process there is alive, so a probe sends no credentials and ignores the answer. A
probe takes at most PROBE_TIMEOUT_S and only a few run at a time, so probes never delay the agent's own work.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
from contextlib import suppress
from typing import NamedTuple

from elastipod_agent.core.requests import BadBody

PROBE_TIMEOUT_S = 2.0
MAX_PROBES = 4
# Failures of this agent's own machine say nothing about the other agent.
_OWN_FAILURES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENETUNREACH}
)


class ProbeTarget(NamedTuple):
    """An agent's address. host: an IP address, never a name."""

    host: str
    port: int


def parse_probe_target(text: str) -> ProbeTarget:
    """Parse `<ip>:<port>`, with an IPv6 address in brackets. Raises BadBody."""
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0
        if not 0 < number < 1 << 16:
            raise ValueError
    except ValueError:
        raise BadBody(
            "reach", f"is {text[:80]!r}; it must be an IP address and a port, such as 10.0.0.7:8080"
        ) from None
    return ProbeTarget(str(address), number)


class PeerProber:
    """Probes other agents, at most MAX_PROBES at a time."""

    def __init__(self) -> None:
        self._running = 0

    async def is_reachable(self, target: ProbeTarget) -> bool | None:
        """Tell whether an agent answers there; None if this agent cannot tell for a reason of its own."""
        if self._running >= MAX_PROBES:
            return None
        self._running += 1
        try:
            return await asyncio.wait_for(_answers_http(target), PROBE_TIMEOUT_S)
        except asyncio.TimeoutError:
            return False
        except OSError as error:
            return None if error.errno in _OWN_FAILURES else False
        finally:
            self._running -= 1


async def _answers_http(target: ProbeTarget) -> bool:
    reader, writer = await asyncio.open_connection(target.host, target.port, limit=1024)
    try:
        shown = f"[{target.host}]" if ":" in target.host else target.host
        writer.write(f"GET /status HTTP/1.1\r\nHost: {shown}:{target.port}\r\nConnection: close\r\n\r\n".encode())
        return (await reader.readexactly(7)) == b"HTTP/1."
    except asyncio.IncompleteReadError:
        return False
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()
