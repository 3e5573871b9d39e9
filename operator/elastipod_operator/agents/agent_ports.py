"""The part of the agents that the shell uses: `AgentStatusCache` and `CommandSender`, and what unit tests put in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import aiohttp

from ..core.snapshot import ObservedAgent
from .authentication import Authenticators
from .commands import Command, CommandSender
from .encoded_json import EncodedJson
from .polled_agent import Address
from .status_cache import AgentStatusCache

Wake = Callable[[str], None]


class AgentStatuses(Protocol):
    """The newest answers of the agents, by UID of the pod."""

    def watch(self, pod_uid: str, address: Address) -> None:
        """Begin to poll an agent, or continue at its new address."""

    def watches(self, pod_uid: str, ip: str, port: int, restarts: int = 0) -> bool:
        """Whether the agent of a pod is polled at this address already. restarts: of its container."""

    def stop_polling(self, pod_uid: str) -> None:
        """Stop polling an agent that has ended. Its last status stays in the cache until its pod is deleted."""

    def forget(self, pod_uid: str) -> None:
        """Drop an agent whose pod was deleted."""

    def fact(self, pod_uid: str) -> ObservedAgent:
        """Give the newest fact about an agent; an empty one if it is not polled."""

    def progress(self, pod_uids: Iterable[str], generation: int = 0) -> dict[str, Any]:
        """Give the newest complete checkpoint for each prefix (for the /start of a generation)."""

    def worker_data(self, pod_uids: Iterable[str]) -> EncodedJson | list[Any] | None:
        """Give the data that the workers of these pods left for each other (for the next /start); None if it is too much."""

    async def close(self) -> None:
        """Stop all polls."""


class AgentCalls(Protocol):
    """Calls that change something at agents."""

    async def send(self, commands: list[Command]) -> list[str]:
        """Send all commands that are due; gives one sentence for each failure."""


ConnectAgents = Callable[[Wake], tuple[AgentStatuses, AgentCalls]]
"""Connects to the agents. wake: called with a job's UID when the status of its agents changed."""


def agents_over(session: aiohttp.ClientSession) -> ConnectAgents:
    """Connect to real agents."""
    known = Authenticators()
    return lambda wake: (AgentStatusCache(session, wake, known), CommandSender(session, known))
