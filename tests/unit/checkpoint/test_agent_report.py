"""Which rank tells the agent of a durable checkpoint, and what becomes of an agent that cannot be told."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from elastipod.checkpoint import agent_report
from elastipod.checkpoint.agent_report import report_checkpoint
from elastipod.ipc.connections import HyperPodIPCException
from elastipod.ipc.protocol import SOCKET_ENV, CheckpointType


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The calls to the agent's client."""
    for name in ("ELASTIPOD_LOCAL_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(SOCKET_ENV, "/socket")
    client = mock.Mock()
    monkeypatch.setattr(agent_report, "CheckpointDiscoverySocketClient", client)
    return client


CALLS = [
    mock.call("elastipod", num_model_checkpoints=1),
    mock.call().update(7, "/checkpoints/7", CheckpointType.MODEL_CHECKPOINT),
    mock.call().close(),
]


@pytest.mark.parametrize(
    ("environ", "is_told"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"ELASTIPOD_LOCAL_RANK": "0", "LOCAL_RANK": "1"}, True),
        ({"ELASTIPOD_LOCAL_RANK": "1", "LOCAL_RANK": "0"}, False),
        ({"ELASTIPOD_LOCAL_RANK": "2"}, False),
        ({SOCKET_ENV: ""}, False),
    ],
)
def test_one_rank_of_a_pod_tells_its_agent(
    monkeypatch: pytest.MonkeyPatch, told: Any, environ: dict[str, str], is_told: bool
) -> None:
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    report_checkpoint(7, "/checkpoints/7")
    assert told.mock_calls == (CALLS if is_told else [])


@pytest.mark.parametrize("when", ["connecting", "telling"])
def test_an_agent_that_cannot_be_told_is_a_warning(told: Any, caplog: pytest.LogCaptureFixture, when: str) -> None:
    error = HyperPodIPCException("gone")
    if when == "connecting":
        told.side_effect = error
    else:
        told.return_value.update.side_effect = error
    report_checkpoint(7, "/checkpoints/7")
    assert told.return_value.close.call_count == (when == "telling")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "the checkpoint of step 7 was not reported to the agent: gone"
