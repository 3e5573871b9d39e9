"""The import path that existing training scripts use for the agent's socket."""

from elastipod.ipc.clients import (
    CheckpointDiscoverySocketClient,
    HyperPodPLRException,
    InProcessRestartSocketClient,
    InProcessRestartSocketMessageType,
    TrainingManager,
)
from elastipod.ipc.connections import HyperPodIPCException
from elastipod.ipc.protocol import RestartMode

__all__ = [
    "CheckpointDiscoverySocketClient",
    "HyperPodIPCException",
    "HyperPodPLRException",
    "InProcessRestartSocketClient",
    "InProcessRestartSocketMessageType",
    "RestartMode",
    "TrainingManager",
]
