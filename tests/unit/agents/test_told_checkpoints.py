"""From which checkpoint a job resumes, by what its agents tell."""

from __future__ import annotations

from typing import Any

import pytest

from elastipod_operator.agents.told_checkpoints import ToldCheckpoint, agreed_checkpoint


def told(step: int, generation: int = 4, *, reported: bool = True) -> ToldCheckpoint:
    entry: dict[str, Any] = {"progressData": f"/ck/{step}" if step >= 0 else None, "progressCount": step}
    return ToldCheckpoint(generation, entry | ({"progressReported": True} if reported else {}))


@pytest.mark.parametrize(
    ("prefix", "agents", "step"),
    [
        pytest.param("run", [told(200), told(100)], 100, id="a rank of another pod died before it wrote its part"),
        pytest.param("run", [told(200), told(-1)], None, id="it died in the first save of all"),
        pytest.param("run", [told(200), told(100, reported=False)], 200, id="only the first pod saves"),
        pytest.param(
            "run", [told(200), told(100, 3)], 200, id="a pod has reported as a member of an earlier generation"
        ),
        pytest.param(
            "run", [told(200, reported=False), told(100, reported=False)], 200, id="agents of earlier versions"
        ),
        pytest.param("run", [told(100, 5, reported=False), told(200)], 100, id="the first agent has its start already"),
        pytest.param("run", [told(100, 5, reported=False), told(50)], 100, id="also where the others tell less"),
        pytest.param("elastipod", [told(200), told(100)], 200, id="CheckpointManager reports whole steps"),
    ],
)
def test_a_job_resumes_from_what_all_pods_that_save_have_completed(
    prefix: str, agents: list[ToldCheckpoint], step: int | None
) -> None:
    expected = None if step is None else {"progressData": f"/ck/{step}", "progressCount": step}
    assert agreed_checkpoint(prefix, agents, 5) == expected
