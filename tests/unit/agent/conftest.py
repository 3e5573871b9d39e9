"""The agent in the process of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.unit.agent.agent_in_process import AgentInProcess, pod
from tests.unit.agent.ipc_pod import Pod

from elastipod.ipc.protocol import SOCKET_ENV


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentInProcess]:
    """An agent that has yet to be run, with the environment of a pod."""
    with pod(tmp_path) as one:
        yield one


@pytest_asyncio.fixture(name="pod")
async def ipc_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pod]:
    """The agent's side of its socket, listening, with the environment of a worker."""
    path = tmp_path / "s"
    monkeypatch.setenv(SOCKET_ENV, str(path))
    for name in ("LOCAL_RANK", "ELASTIPOD_GENERATION", "ELASTIPOD_PROGRESS", "ELASTIPOD_STORE"):
        monkeypatch.setenv(name, "0")  # what clients change is undone with it
    monkeypatch.delenv("ELASTIPOD_LOCAL_RANK", raising=False)
    one = Pod(path)
    await one.server.listen()
    yield one
    for client in one.clients:
        client.close()
    await one.server.close()
