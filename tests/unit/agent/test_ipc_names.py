"""The names and signatures that training code written for the original imports and calls."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
from tests.nonempty import every
from tests.patience import PATIENCE_S

import elastipod.ipc.clients
from hyperpod_elastic_agent import ipc

EMPTY = inspect.Parameter.empty
# callable -> its parameters with their defaults, as the original's package shows them
SIGNATURES: dict[str, dict[str, Any]] = {
    "InProcessRestartSocketClient": {},
    "InProcessRestartSocketClient.connect": {"self": EMPTY},
    "InProcessRestartSocketClient.hyperpod_barrier": {"self": EMPTY, "timeout": None},
    "InProcessRestartSocketClient.hyperpod_past_rcb_barrier": {"self": EMPTY},
    "InProcessRestartSocketClient.hyperpod_wait_fault": {"self": EMPTY, "timeout": None},
    "InProcessRestartSocketClient.hyperpod_wait_rank_info": {"self": EMPTY, "timeout": None},
    "InProcessRestartSocketClient.hyperpod_send_data": {"self": EMPTY, "rank": EMPTY, "data": EMPTY},
    "InProcessRestartSocketClient.hyperpod_send_fault": {
        "self": EMPTY,
        "rank": EMPTY,
        "restart_mode": "in_process_restart",
        "reason": None,
        "message": None,
    },
    "InProcessRestartSocketClient.hyperpod_notify_labels": {"self": EMPTY, "labels": EMPTY},
    "CheckpointDiscoverySocketClient": {"prefix": EMPTY, "num_model_checkpoints": 0, "num_data_checkpoints": 0},
    "CheckpointDiscoverySocketClient.connect": {"self": EMPTY},
    "CheckpointDiscoverySocketClient.update": {"self": EMPTY, "step": EMPTY, "path": EMPTY, "checkpoint_type": EMPTY},
    "CheckpointDiscoverySocketClient.get_latest_checkpoint_path": {"self": EMPTY},
    "TrainingManager": {},
    "TrainingManager.get_checkpoint_discovery_client": {
        "prefix": EMPTY,
        "num_model_checkpoints": 0,
        "num_data_checkpoints": 0,
    },
}
VALUES = {
    "RestartMode.IN_PROCESS_RESTART": "in_process_restart",
    "RestartMode.PROCESS_LEVEL_RESTART": "process_level_restart",
    "RestartMode.LOCAL_PRL": "local_process_level_restart",
    "RestartMode.JOB_LEVEL_RESTART": "job_level_restart",
    "InProcessRestartSocketMessageType.AT_RCB_BARRIER": "at_rcb_barrier",
    "InProcessRestartSocketMessageType.PAST_RCB_BARRIER": "past_rcb_barrier",
    "InProcessRestartSocketMessageType.JOB_START": "job_start",
    "InProcessRestartSocketMessageType.JOB_FAULT": "job_fault",
    "InProcessRestartSocketMessageType.JOB_DATA": "job_data",
    "InProcessRestartSocketMessageType.JOB_RANK_INFO": "job_rank_info",
    "InProcessRestartSocketMessageType.JOB_FAILED_RANKS": "job_failed_ranks",
    "InProcessRestartSocketMessageType.RANK_LABELS": "rank_labels",
}
HOMES = {
    "hyperpod_elastic_agent": [
        "CheckpointDiscoverySocketClient",
        "InProcessRestartSocketClient",
        "InProcessRestartSocketMessageType",
        "RestartMode",
        "TrainingManager",
    ],
    "hyperpod_elastic_agent.ipc": [
        "CheckpointDiscoverySocketClient",
        "HyperPodIPCException",
        "HyperPodPLRException",
        "InProcessRestartSocketClient",
        "InProcessRestartSocketMessageType",
        "RestartMode",
        "TrainingManager",
    ],
    "hyperpod_elastic_agent.checkpoint_discovery": ["CheckpointType"],
    "hyperpod_elastic_agent.elastic_event_handler": ["elastic_event_detected"],
}


def _named(path: str) -> Any:
    value: Any = ipc
    for name in path.split("."):
        value = getattr(value, name)
    return value


@pytest.mark.parametrize(("path", "parameters"), SIGNATURES.items(), ids=SIGNATURES)
def test_parameters_and_defaults(path: str, parameters: dict[str, Any]) -> None:
    found = {name: one.default for name, one in inspect.signature(_named(path)).parameters.items()}
    assert found == parameters


@pytest.mark.parametrize(("path", "value"), VALUES.items(), ids=VALUES)
def test_values(path: str, value: str) -> None:
    assert _named(path).value == value
    assert _named(path) == value, "the enums are strings"


@pytest.mark.parametrize(("module", "names"), HOMES.items(), ids=HOMES)
def test_modules_export(module: str, names: list[str]) -> None:
    assert every(hasattr(import_module(module), name) for name in names)
    assert sorted(import_module(module).__all__) == names


def test_errors_are_of_the_kind_that_scripts_catch() -> None:
    assert issubclass(ipc.HyperPodIPCException, RuntimeError)
    assert issubclass(ipc.HyperPodPLRException, RuntimeError)


def test_outside_a_pod_a_client_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH", raising=False)
    for make in (
        ipc.InProcessRestartSocketClient,
        ipc.TrainingManager,
        lambda: ipc.CheckpointDiscoverySocketClient("x"),
    ):
        with pytest.raises(ValueError, match="HYPERPOD_ELASTICAGENT_SOCKET_SERVER_PATH is not set"):
            make()


def test_the_names_cost_no_torch() -> None:
    code = "import sys, hyperpod_elastic_agent.ipc, hyperpod_elastic_agent.checkpoint_discovery; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == "False"
    assert elastipod.ipc.clients.TrainingManager is ipc.TrainingManager
