"""The agent in the process of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.agent.agent_in_process import AgentInProcess, pod


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentInProcess]:
    """An agent that has yet to be run, with the environment of a pod."""
    with pod(tmp_path) as one:
        yield one
