"""Checkpoints outside a pod, whatever the environment of the tests says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.checkpoint.memory_places import agent_page

from elastipod.worker_file import WorkerFile

OF_A_POD = ("ELASTIPOD_GENERATION", "JOB_RESTART_COUNT", "ELASTIPOD_RUN_ID", "ELASTIPOD_JOB", "ELASTIPOD_MEMORY_DIR")


@pytest.fixture(autouse=True)
def outside_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what an agent sets; a test that plays a pod sets it again."""
    for name in OF_A_POD:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerFile]:
    """The page of the agent whose worker this process is."""
    with agent_page(tmp_path, monkeypatch) as file:
        yield file
