"""An agent that is polled, and its newest status."""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass, field, replace
from datetime import timedelta

from .. import clock
from ..core.snapshot import ObservedAgent
from .authentication import NO_CREDENTIALS, Authenticator, Credentials
from .polls import PollConnection


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a pod's agent, and the job to wake."""

    job: str
    ip: str
    port: int
    credentials: Credentials = NO_CREDENTIALS
    """The credentials of the operator and the agent."""
    restarts: int = 0
    """Restarts of its container; each one is a new agent process."""

    def url(self, path: str) -> str:
        return f"http://{self.host_port}{path}"

    @property
    def host_port(self) -> str:
        """Host and port."""
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return f"{host}:{self.port}"


@dataclass(slots=True)
class PolledAgent:
    """An agent that is polled, and its newest status."""

    address: Address
    authenticator: Authenticator
    """Also of its other callers, for as long as it is polled."""
    fact: ObservedAgent = field(default_factory=ObservedAgent)
    version: int | None = None
    progress: str = ""
    worker_data: str = ""
    """Both as in AgentStatus."""
    num_text_bytes: int = 0
    """Counted bytes of its failure message."""
    task: asyncio.Task[None] | None = None
    last_error: str = ""
    connection: PollConnection | None = None
    """For its long polls; created with the first one."""
    needs_http_client: bool = False
    """Its responses need the general HTTP client."""
    is_long: bool = False
    """Its present poll lasts longer than a heartbeat."""
    hash_position: float = field(init=False)
    """A hash from 0 to 1 that spreads agents."""

    def __post_init__(self) -> None:
        self.hash_position = zlib.crc32(self.address.url("").encode()) / 2**32

    def stop(self) -> None:
        """Stop polling it."""
        if self.task is not None:
            self.task.cancel()
            self.task = None
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def with_kernel_activity(polled: PolledAgent) -> ObservedAgent:
    """Give the fact of an agent in a long poll, with its machine's last sign of life as the last answer."""
    heard_at = polled.connection.heard_at() if polled.connection is not None else None
    if heard_at is None:
        return polled.fact
    heard = clock.now() - timedelta(seconds=time.monotonic() - heard_at)
    before = polled.fact.last_answer
    return polled.fact if before is None or heard <= before else replace(polled.fact, last_answer=heard)
