"""The import path that existing training scripts use for the agent's socket."""

from elastipod.ipc import (
    CheckpointDiscoverySocketClient,
    HyperPodPLRException,
    InProcessRestartSocketClient,
    InProcessRestartSocketMessageType,
    TrainingManager,
)
from elastipod.ipc_connection import HyperPodIPCException
from elastipod.ipc_wire import RestartMode

__all__ = [
    "CheckpointDiscoverySocketClient",
    "HyperPodIPCException",
    "HyperPodPLRException",
    "InProcessRestartSocketClient",
    "InProcessRestartSocketMessageType",
    "RestartMode",
    "TrainingManager",
]
