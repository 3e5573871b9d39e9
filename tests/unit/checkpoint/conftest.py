"""Checkpoints outside a pod, whatever the environment of the tests says."""

from __future__ import annotations

import pytest

OF_A_POD = ("ELASTIPOD_GENERATION", "JOB_RESTART_COUNT", "ELASTIPOD_RUN_ID", "ELASTIPOD_JOB", "ELASTIPOD_MEMORY_DIR")


@pytest.fixture(autouse=True)
def outside_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what an agent sets; a test that plays a pod sets it again."""
    for name in OF_A_POD:
        monkeypatch.delenv(name, raising=False)
